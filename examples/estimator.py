"""Train in the style of TPUEstimator, with `model_fn`, `input_fn` and steps, on a Delta table of Fashion-MNIST.

python examples/estimator.py runs/fashion --max-steps 300          # a second run with more steps continues the first
python examples/estimator.py runs/fashion --accelerator xla        # the step as one program; "tpu" on a TPU
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import footplate as fp
from footplate.compat import estimator as est
from footplate.demo import TABLES


def make_net():
    features = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2)
    )
    return nn.Sequential(features, nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))


def model_fn(features, mode, params):
    net = est.get_module("net", make_net)
    logits = net(features["image"].float() / 255 - 0.5)
    if mode == est.ModeKeys.PREDICT:
        return est.EstimatorSpec(mode, predictions={"class": logits.argmax(1)})
    return est.EstimatorSpec(
        mode,
        loss=F.cross_entropy(logits, features["label"]),
        train_op=lambda: torch.optim.AdamW(net.parameters(), lr=params["lr"]),
        eval_metric_ops={"accuracy": (logits.argmax(1) == features["label"]).float().mean()},
    )


def train_input_fn(params):
    return fp.Loader(fp.Table(TABLES / "train"), params["batch_size"], shuffle=True, drop_last=True)


def eval_input_fn(params):
    return fp.Loader(fp.Table(TABLES / "val"), params["batch_size"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir")
    parser.add_argument("--max-steps", type=int, default=300)
    parser.add_argument("--accelerator", default="auto")
    args = parser.parse_args()
    config = est.RunConfig(tf_random_seed=1, save_checkpoints_steps=100, trainer={"accelerator": args.accelerator})
    sizes = {"train_batch_size": 128, "eval_batch_size": 200, "predict_batch_size": 200}
    estimator = est.TPUEstimator(model_fn, args.model_dir, config, params={"lr": 2e-3}, **sizes)
    began = estimator.global_step
    training = est.TrainSpec(train_input_fn, max_steps=args.max_steps)
    results = est.train_and_evaluate(estimator, training, est.EvalSpec(eval_input_fn, steps=None))
    print(f"steps {began} to {results['global_step']}: accuracy {results['accuracy']:.3f}")
    print(f"the first image is of class {int(next(estimator.predict(eval_input_fn))['class'])}")
