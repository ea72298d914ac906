"""Models for `xla_coverage.py`: as their libraries make them, in training mode, with their own dropout.

They are the smallest member of every torchvision architecture, the smallest member of each timm file, and transformers
models of each kind with small random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import let_torchvision_be_imported
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import footplate as fp

let_torchvision_be_imported()

WORDS, LENGTH, ROWS, CLASSES = 64, 16, 2, 4


class Whatever(fp.Module):
    """Trains any model by its own loss, or by the squares of all its outputs, so that all have a backward pass."""

    def __init__(self, net: nn.Module, flags: dict[str, Any]) -> None:
        super().__init__()
        self.net, self.flags = net, flags

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        positional, named = batch
        output = self.net(*positional, **named, **self.flags)
        loss = getattr(output, "loss", None)
        if isinstance(loss, Tensor):
            return loss
        leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        return torch.stack([leaf.square().mean() for leaf in leaves]).sum()


Made = tuple[Whatever, tuple[tuple[Tensor, ...], dict[str, Tensor]]]
"""A module, and a batch: the positional and the named arguments of one call."""
Model = Callable[[], Made]


def models() -> Iterator[tuple[str, str, Model]]:
    """Library, name and model of each entry."""
    for name, sizes in _TORCHVISION.items():
        yield "torchvision", name, _torchvision(name, sizes)
    for name in _DETECTORS:
        yield "torchvision", name, _detector(name)
    for name, size in _TIMM.items():
        yield "timm", name, _timm(name, size)
    for name, (batch, settings) in _TRANSFORMERS.items():
        yield ("transformers", name.removesuffix("Model"), _transformers(name, batch, settings))


# torchvision

_IMAGE, _CLIP, _FRAMES = (3, 64, 64), (3, 16, 64, 64), (3, 128, 128)
_TORCHVISION: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(
        (
            "convnext_tiny",
            "densenet121",
            "efficientnet_b0",
            "efficientnet_v2_s",
            "mnasnet0_5",
            "mobilenet_v2",
            "mobilenet_v3_small",
            "regnet_x_400mf",
            "regnet_y_400mf",
            "resnet18",
            "resnet50",
            "resnext50_32x4d",
            "shufflenet_v2_x0_5",
            "squeezenet1_1",
            "swin_t",
            "swin_v2_t",
            "vgg11",
            "vgg11_bn",
            "wide_resnet50_2",
            "deeplabv3_resnet50",
            "deeplabv3_mobilenet_v3_large",
            "fcn_resnet50",
            "lraspp_mobilenet_v3_large",
        ),
        (_IMAGE,),
    ),
    "alexnet": ((3, 96, 96),),
    "googlenet": ((3, 96, 96),),
    "inception_v3": ((3, 299, 299),),
    "maxvit_t": ((3, 224, 224),),
    "vit_b_32": ((3, 224, 224),),
    **dict.fromkeys(("r3d_18", "mc3_18", "r2plus1d_18", "swin3d_t"), (_CLIP,)),
    "s3d": ((3, 16, 224, 224),),
    "mvit_v1_b": ((3, 16, 224, 224),),
    "mvit_v2_s": ((3, 16, 224, 224),),
    "raft_small": (_FRAMES, _FRAMES),
}
_WITHOUT_INIT = {"googlenet": {"init_weights": False}, "inception_v3": {"init_weights": False}}
_NO_BACKBONE = ("deeplabv3", "fcn", "lraspp")


def _torchvision(name: str, sizes: tuple[tuple[int, ...], ...]) -> Model:
    def make() -> Made:
        from torchvision import models

        settings: dict[str, Any] = dict(_WITHOUT_INIT.get(name, {}))
        if name.startswith(_NO_BACKBONE):
            settings["weights_backbone"] = None
        net = models.get_model(name, weights=None, **settings)
        return Whatever(net, {}), (tuple(torch.randn(ROWS, *one) for one in sizes), {})

    return make


_DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_320_fpn", "fcos_resnet50_fpn", "keypointrcnn_resnet50_fpn", "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large",
)  # fmt: skip


def _detector(name: str) -> Model:
    class Detector(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            from torchvision import models

            self.net = models.get_model(name, weights=None, weights_backbone=None)

        def forward(self, images: Tensor, **targets: Tensor) -> Any:
            each = [{key: value[row] for key, value in targets.items()} for row in range(len(images))]
            return self.net(list(images), each)

    def make() -> Made:
        targets: dict[str, Tensor] = {
            "boxes": torch.tensor([[[4.0, 4.0, 60.0, 80.0]]] * ROWS),
            "labels": torch.ones(ROWS, 1, dtype=torch.long),
        }
        if name.startswith("mask"):
            targets["masks"] = torch.ones(ROWS, 1, 96, 96, dtype=torch.uint8)
        if name.startswith("keypoint"):
            targets["keypoints"] = torch.ones(ROWS, 1, 17, 3)
        return Whatever(Detector(), {}), ((torch.rand(ROWS, 3, 96, 96),), targets)

    return make


# timm

_TIMM: dict[str, int] = {
    **dict.fromkeys(
        (
            "beit_base_patch16_224",
            "cait_xxs24_224",
            "coat_tiny",
            "convit_tiny",
            "convmixer_768_32",
            "convnext_zepto_rms",
            "cpubone_nano",
            "cspnext_tiny",
            "davit_tiny",
            "deit_tiny_patch16_224",
            "densenet121",
            "dla46x_c",
            "dpn48b",
            "efficientformer_l1",
            "efficientformerv2_s0",
            "efficientnet_lite0",
            "efficientvim_m1",
            "efficientvit_b0",
            "efficientvit_m0",
            "ese_vovnet19b_slim_dw",
            "fasternet_t0",
            "focalnet_tiny_srf",
            "gcvit_xxtiny",
            "ghostnet_050",
            "gmlp_ti16_224",
            "hardcorenas_b",
            "hgnetv2_b0",
            "hiera_tiny_224",
            "hrnet_w18_small",
            "iformer_t",
            "inception_next_atto",
            "lcnetv2_small",
            "legacy_seresnet18",
            "levit_128s",
            "lowformer_b0",
            "mambaout_femto",
            "mobilenetv3_small_050",
            "mobileone_s1",
            "mvitv2_tiny",
            "nest_tiny",
            "nextvit_small",
            "pit_ti_224",
            "poolformerv2_s12",
            "pvt_v2_b0",
            "rdnet_tiny",
            "regnetx_002",
            "repghostnet_050",
            "repvit_m1",
            "res2next50",
            "resnest14d",
            "resnetv2_18",
            "rexnet_100",
            "samvit_base_patch16_224",
            "selecsls42",
            "sequencer2d_s",
            "shvit_s1",
            "skresnet18",
            "starnet_s050",
            "swiftformer_xs",
            "swin_tiny_patch4_window7_224",
            "swinv2_cr_tiny_224",
            "tiny_vit_5m_224",
            "tnt_s_legacy_patch16_224",
            "tresnet_m",
            "twins_svt_small",
            "vgg11",
            "visformer_tiny",
            "vit_srelpos_small_patch16_224",
            "vit_tiny_r_s16_p8_224",
            "vitamin_small_224",
            "volo_d1_224",
            "xcit_nano_12_p8_224",
        ),
        224,
    ),
    **dict.fromkeys(
        (
            "cs3darknet_focus_s",
            "edgenext_xx_small",
            "fastvit_t8",
            "halonet_h1",
            "maxvit_pico_rw_256",
            "mobilenetv5_base",
            "mobilevit_xxs",
            "swinv2_tiny_window8_256",
            "vit_tiny_patch16_dinov3_qkvb",
        ),
        256,
    ),
    **dict.fromkeys(("inception_resnet_v2", "inception_v3", "inception_v4", "legacy_xception", "xception41p"), 299),
    "crossvit_tiny_240": 240,
    "flexivit_small": 240,
    "gemma4_vit_167m": 768,
    "qwen3_vit_88m": 768,
    "nasnetalarge": 331,
    "pnasnet5large": 331,
    "csatv2": 512,
    "deepseek_vit_412m": 546,
    "naflexvit_base_patch16_parfac_gap": 384,
    "nf_regnet_b0": 192,
    "resnet10t": 176,
    "sam2_hiera_tiny": 896,
}


def _timm(name: str, size: int) -> Model:
    def make() -> Made:
        import timm

        return Whatever(timm.create_model(name, pretrained=False), {}), ((torch.randn(ROWS, 3, size, size),), {})

    return make


# transformers

_SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_PAIR: dict[str, Any] = {
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
_SPEECH: dict[str, Any] = {
    **_SMALL,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 8),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
}


def _words() -> dict[str, Tensor]:
    words = torch.randint(3, WORDS, (ROWS, LENGTH))
    return {"input_ids": words, "attention_mask": (torch.arange(LENGTH) < torch.tensor([[LENGTH], [9]])).long()}


def _next_words() -> dict[str, Tensor]:
    words = _words()
    return {**words, "labels": words["input_ids"]}


def _text_class() -> dict[str, Tensor]:
    return {**_words(), "labels": torch.tensor([0, 1])}


def _image_class() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32), "labels": torch.tensor([0, 1])}


def _image_64() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.tensor([0, 1])}


def _image() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32)}


def _segments() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 64, 64), "labels": torch.randint(0, 2, (ROWS, 64, 64))}


def _sound() -> dict[str, Tensor]:
    return {"input_values": torch.randn(ROWS, 1600), "labels": torch.randint(3, WORDS, (ROWS, 5))}


def _spectrum() -> dict[str, Tensor]:
    return {"input_features": torch.randn(ROWS, 80, 60), "labels": torch.randint(3, WORDS, (ROWS, 8))}


def _spectrogram() -> dict[str, Tensor]:
    return {"input_values": torch.randn(ROWS, 32, 16), "labels": torch.tensor([0, 1])}


def _image_and_words() -> dict[str, Tensor]:
    return {**_words(), **_image()}


def _image_in_words() -> dict[str, Tensor]:
    words = torch.randint(3, WORDS - 1, (ROWS, 16 + LENGTH))
    words[:, :16] = WORDS - 1  # the positions of the image's 16 patches
    return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words, **_image()}


_Batch = Callable[[], dict[str, Any]]
_FEW_KEYS = {"num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {**_FEW_KEYS, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
_TEXT_TOWER = {**_SMALL, "max_position_embeddings": LENGTH}
_TRANSFORMERS: dict[str, tuple[_Batch, dict[str, Any]]] = {
    **dict.fromkeys(
        [
            f"{name}ForSequenceClassification"
            for name in (
                "Bert",
                "Roberta",
                "XLMRoberta",
                "Camembert",
                "Electra",
                "DebertaV2",
                "Deberta",
                "MPNet",
                "Nystromformer",
                "ModernBert",
                "RoFormer",
                "ConvBert",
                "MobileBert",
                "SqueezeBert",
                "BigBird",
            )
        ],
        (_text_class, {"embedding_size": 32, "attention_type": "original_full"}),
    ),
    "AlbertForSequenceClassification": (_text_class, {"embedding_size": 16}),
    "DistilBertForSequenceClassification": (_text_class, {"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2}),
    "XLNetForSequenceClassification": (_text_class, {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}),
    "FNetForSequenceClassification": (lambda: {k: v for k, v in _text_class().items() if k != "attention_mask"}, {}),
    "FunnelForSequenceClassification": (
        _text_class,
        {"d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64, "block_sizes": [1, 1]},
    ),
    "LongformerForSequenceClassification": (_text_class, {"attention_window": 8}),
    "BertForMaskedLM": (_next_words, {}),
    **dict.fromkeys(
        [
            f"{name}ForCausalLM"
            for name in (
                "GPTNeoX",
                "GPTJ",
                "Bloom",
                "Falcon",
                "Phi",
                "CodeGen",
                "GPTBigCode",
                "Mpt",
                "Persimmon",
                "BioGpt",
            )
        ],
        (_next_words, {"n_positions": 64, "rotary_dim": 4, "hidden_size": 32}),
    ),
    "GPT2LMHeadModel": (_next_words, {}),
    "GPTNeoForCausalLM": (
        _next_words,
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "OPTForCausalLM": (_next_words, {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "XGLMForCausalLM": (_next_words, {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}),
    **dict.fromkeys(
        [
            f"{name}ForCausalLM"
            for name in (
                "Llama",
                "Mistral",
                "Gemma",
                "Gemma2",
                "Phi3",
                "Qwen2",
                "Qwen3",
                "Olmo",
                "Olmo2",
                "Cohere",
                "StableLm",
                "Starcoder2",
                "Granite",
                "Glm",
                "Nemotron",
                "SmolLM3",
                "Helium",
                "Exaone4",
            )
        ],
        (_next_words, _FEW_KEYS),
    ),
    "Gemma3ForCausalLM": (_next_words, _FEW_KEYS),
    **dict.fromkeys(
        [
            f"{name}ForCausalLM"
            for name in ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss", "Phimoe", "GraniteMoe")
        ],
        (_next_words, {**_EXPERTS, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}),
    ),
    "DeepseekV3ForCausalLM": (
        _next_words,
        {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
        },
    ),
    "MambaForCausalLM": (_next_words, {}),
    "Mamba2ForCausalLM": (
        _next_words,
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "RwkvForCausalLM": (_next_words, {"attention_hidden_size": 32}),
    "JambaForCausalLM": (
        _next_words,
        {**_EXPERTS, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1},
    ),
    "RecurrentGemmaForCausalLM": (_next_words, {"num_hidden_layers": 3, "lru_width": 32}),
    "T5ForConditionalGeneration": (
        _next_words,
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "MT5ForConditionalGeneration": (
        _next_words,
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    **dict.fromkeys(
        [f"{name}ForConditionalGeneration" for name in ("Bart", "MBart", "Pegasus", "Blenderbot", "M2M100", "PLBart")],
        (_next_words, _PAIR),
    ),
    "MarianMTModel": (_next_words, _PAIR),
    "LEDForConditionalGeneration": (_next_words, {**_PAIR, "attention_window": 8}),
    "ProphetNetForConditionalGeneration": (
        _next_words,
        {
            "vocab_size": WORDS,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
        },
    ),
    "WhisperForConditionalGeneration": (_spectrum, {**_PAIR, "max_source_positions": 30, "max_target_positions": 16}),
    "Speech2TextForConditionalGeneration": (
        lambda: {**_spectrum(), "input_features": torch.randn(ROWS, 60, 80)},
        {**_PAIR, "max_source_positions": 60, "max_target_positions": 16},
    ),
    "SpeechT5Model": (
        lambda: {"input_values": torch.randn(ROWS, 60, 32), "decoder_input_values": torch.randn(ROWS, 20, 32)},
        {**_PAIR, "hidden_size": 32},
    ),
    **dict.fromkeys([f"{name}ForCTC" for name in ("Wav2Vec2", "Hubert", "WavLM", "SEW")], (_sound, _SPEECH)),
    "Wav2Vec2ForPreTraining": (
        lambda: {
            "input_values": torch.randn(ROWS, 1600),
            "mask_time_indices": torch.ones(ROWS, 98, dtype=torch.bool),
            "sampled_negative_indices": torch.randint(0, 97, (ROWS, 98, 10)),
        },
        {**_SPEECH, "mask_time_prob": 0.05, "codevector_dim": 16, "num_codevectors_per_group": 8},
    ),
    "ASTForAudioClassification": (_spectrogram, {**_TOWER, "max_length": 32, "num_mel_bins": 16, "patch_size": 8}),
    **dict.fromkeys(
        [f"{name}ForImageClassification" for name in ("ViT", "DeiT", "Beit", "Data2VecVision", "Dinov2", "ViTMSN")],
        (_image_class, _TOWER),
    ),
    "DINOv3ViTModel": (_image, _TOWER),
    "ViTMAEForPreTraining": (
        _image,
        {
            **_TOWER,
            "decoder_hidden_size": 32,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 4,
            "decoder_intermediate_size": 64,
        },
    ),
    **dict.fromkeys(
        [f"{name}ForImageClassification" for name in ("Swin", "Swinv2")],
        (
            _image_64,
            {
                "image_size": 64,
                "patch_size": 2,
                "embed_dim": 16,
                "depths": [2, 2],
                "num_heads": [2, 2],
                "window_size": 4,
            },
        ),
    ),
    "ConvNextForImageClassification": (_image_64, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "ConvNextV2ForImageClassification": (_image_64, {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}),
    "ResNetForImageClassification": (_image_64, {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}),
    "RegNetForImageClassification": (
        _image_64,
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "groups_width": 4},
    ),
    "LevitForImageClassification": (_image_64, {"image_size": 64}),
    "PvtV2ForImageClassification": (_image_64, {"image_size": 64}),
    "MobileViTForImageClassification": (_image_64, {"image_size": 64}),
    "PoolFormerForImageClassification": (_image_64, {}),
    "FocalNetForImageClassification": (
        _image_64,
        {"image_size": 64, "embed_dim": 16, "depths": [1, 1], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    ),
    "SegformerForSemanticSegmentation": (
        _segments,
        {
            "hidden_sizes": [8, 8, 16, 16],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 1, 2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 2,
        },
    ),
    "UperNetForSemanticSegmentation": (_segments, {"num_labels": 2}),
    "YolosModel": (_image, {**_TOWER, "image_size": [32, 32], "num_detection_tokens": 4}),
    "CLIPModel": (
        lambda: {**_image_and_words(), "return_loss": True},
        {"text_config": _TEXT_TOWER, "vision_config": _TOWER, "projection_dim": 16},
    ),
    "SiglipModel": (
        lambda: {**_image_and_words(), "return_loss": True},
        {"text_config": _TEXT_TOWER, "vision_config": _TOWER},
    ),
    "BlipForConditionalGeneration": (
        lambda: {**_next_words(), **_image()},
        {"text_config": {**_TEXT_TOWER, "encoder_hidden_size": 32}, "vision_config": _TOWER},
    ),
    "ViltModel": (_image_and_words, {**_TOWER, "vocab_size": WORDS}),
    "LlavaForConditionalGeneration": (
        _image_in_words,
        {
            "text_config": {**_SMALL, "model_type": "llama", "num_key_value_heads": 2},
            "vision_config": {**_TOWER, "model_type": "clip_vision_model"},
            "image_token_index": WORDS - 1,
            "vision_feature_layer": -1,
        },
    ),
    "PaliGemmaForConditionalGeneration": (
        lambda: {**_image_in_words(), "token_type_ids": torch.ones(ROWS, 16 + LENGTH, dtype=torch.long)},
        {
            "text_config": {**_SMALL, "model_type": "gemma", "num_key_value_heads": 2, "head_dim": 8},
            "vision_config": {**_TOWER, "model_type": "siglip_vision_model", "projection_dim": 32},
            "image_token_index": WORDS - 1,
            "projection_dim": 32,
        },
    ),
}


def _transformers(name: str, batch: _Batch, settings: dict[str, Any]) -> Model:
    def make() -> Made:
        import transformers

        model = getattr(transformers, name)
        inputs = batch()
        own = "pixel_values" in inputs or not settings.keys().isdisjoint(("block_sizes", "num_encoder_layers"))
        config = model.config_class(**({} if own else _SMALL) | settings)
        flags = {key: value for key, value in inputs.items() if not isinstance(value, Tensor)}
        return Whatever(model(config), flags), ((), {key: inputs[key] for key in inputs.keys() - flags.keys()})

    return make
