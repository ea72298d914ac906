"""Train a small Llama on docstrings, so that the recipe has a base model without a download. It is saved in base/.

    python data.py && python base.py

With a model of your own, leave this out, and name the model in run.yaml.
"""

from data import PackedTables
from model import LanguageModel
from transformers import LlamaConfig, LlamaForCausalLM

import footplate as fp

if __name__ == "__main__":
    fp.seed_everything(1)
    config = LlamaConfig(
        vocab_size=258, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    network = LlamaForCausalLM(config)
    data = PackedTables(train="lake/base", val="lake/base", sequence_length=128, batch_size=16)
    trainer = fp.Trainer(max_epochs=3, limit_val_batches=0, default_root_dir="runs/base")
    trainer.fit(LanguageModel(network, lr=5e-3), data)
    network.save_pretrained("base")
