"""Programs from Horovod's and Databricks' documentation, with changed imports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, Dataset, TensorDataset, distributed

import footplate.compat.horovod as hvd
from footplate.core.errors import ConfigError
from footplate.demo import TABLES
from footplate.launch import Restarts, launch

NONE = Restarts(max_restarts=0)


def pictures(split: str, rows: int) -> Dataset[Any]:
    """Images of Fashion-MNIST, from the demo's table."""
    import io

    import numpy as np
    from deltalake import DeltaTable
    from PIL import Image

    table = DeltaTable(str(TABLES / split)).to_pyarrow_table().slice(0, rows)
    names = table.column_names
    image, label = ("image", "label") if "image" in names else (names[0], names[1])
    arrays = [np.asarray(Image.open(io.BytesIO(data))) for data in table[image].to_pylist()]
    images = torch.from_numpy(np.stack(arrays)).float().unsqueeze(1) / 255
    return TensorDataset((images - 0.2860) / 0.3530, torch.tensor(table[label].to_pylist()))


class Net(nn.Module):
    """As in examples/pytorch/pytorch_mnist.py."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 10, kernel_size=5)
        self.conv2 = nn.Conv2d(10, 20, kernel_size=5)
        self.conv2_drop = nn.Dropout2d()
        self.fc1 = nn.Linear(320, 50)
        self.fc2 = nn.Linear(50, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        x = F.relu(F.max_pool2d(self.conv2_drop(self.conv2(x)), 2))
        x = x.view(-1, 320)
        x = F.relu(self.fc1(x))
        x = F.dropout(x, training=self.training)
        return F.log_softmax(self.fc2(x), dim=1)


def train_mnist(lr: float, epochs: int, **options: Any) -> dict[str, float]:
    """The body of pytorch_mnist.py: a distributed sampler, broadcasts, averaged metrics."""
    hvd.init()
    torch.manual_seed(42)
    torch.set_num_threads(1)
    train_dataset, test_dataset = pictures("train", 2048), pictures("val", 512)
    train_sampler = distributed.DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    train_loader = DataLoader(train_dataset, batch_size=32, sampler=train_sampler)
    test_sampler = distributed.DistributedSampler(test_dataset, num_replicas=hvd.size(), rank=hvd.rank())
    test_loader = DataLoader(test_dataset, batch_size=128, sampler=test_sampler)
    model = Net()
    optimizer = optim.SGD(model.parameters(), lr=lr * hvd.size(), momentum=0.5)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)

    def metric_average(val: float, name: str) -> float:
        return hvd.allreduce(torch.tensor(val), name=name).item()

    for epoch in range(1, epochs + 1):
        model.train()
        train_sampler.set_epoch(epoch)
        for batch_idx, (data, target) in enumerate(train_loader):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            if batch_idx % 32 == 0:
                print(f"Train Epoch: {epoch} [{batch_idx * len(data)}/{len(train_sampler)}]\tLoss: {loss.item():.6f}")
    model.eval()
    test_loss, test_accuracy = 0.0, 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            test_loss += F.nll_loss(output, target, reduction="sum").item()
            test_accuracy += (output.argmax(1) == target).float().sum().item()
    weights = hvd.allgather_object(float(sum(parameter.sum() for parameter in model.parameters())))
    return {
        "size": hvd.size(),
        "loss": metric_average(test_loss / len(test_sampler), "avg_loss"),
        "accuracy": metric_average(test_accuracy / len(test_sampler), "avg_accuracy"),
        "apart": max(weights) - min(weights),
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"compression": hvd.Compression.fp16, "gradient_predivide_factor": 2.0}])
def test_the_mnist_example_learns_on_two_ranks(options):
    outcome = launch(lambda: train_mnist(lr=0.05, epochs=3, **options), world_size=2)
    assert outcome["size"] == 2
    assert outcome["accuracy"] > 0.6
    assert outcome["apart"] == 0


def train_hvd(learning_rate: float = 0.1, rows: int = 64) -> dict[str, float]:
    """As in the Databricks document: initialise, scale the learning rate, wrap the optimizer, broadcast, train."""
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = nn.Linear(8, 3)
    numbers = torch.Generator().manual_seed(0)
    features = torch.randn(rows, 8, generator=numbers)
    data = TensorDataset(features, features[:, :3].argmax(1))
    sampler = distributed.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    optimizer = optim.SGD(model.parameters(), lr=learning_rate * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(float(hvd.allreduce(loss.detach(), name="loss")))
    print(f"rank {hvd.rank()} is done")
    return {"rank": hvd.rank(), "size": hvd.size(), "first": losses[0], "last": losses[-1]}


def test_horovod_runner_gives_what_rank_0_returned():
    result = hvd.HorovodRunner(np=-3, driver_log_verbosity="all").run(train_hvd, learning_rate=0.2, rows=96)
    assert (result["rank"], result["size"]) == (0, 3)
    assert result["last"] < result["first"]


def test_the_same_function_runs_without_a_runner(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = train_hvd()
    hvd.shutdown()
    assert (result["rank"], result["size"]) == (0, 1)
    assert result["last"] < result["first"]


def test_a_positive_np_without_a_cluster_says_what_to_do(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="np=-"):
        hvd.HorovodRunner(np=2).run(train_hvd)


def test_an_exception_of_a_worker_comes_home():
    def main():
        hvd.init()
        if hvd.rank() == 1:
            raise KeyError("a column that isn't there")
        hvd.barrier()

    with pytest.raises(KeyError, match="a column that isn't there"):
        launch(main, world_size=2, restarts=NONE)


def test_a_script_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, footplate.compat.horovod as hvd\n"
        "hvd.init()\n"
        "total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()\n"
        "open(f'{hvd.rank()}.txt', 'w').write(f'{hvd.local_rank()} {hvd.size()} {total}')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120, capture_output=True)
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in (0, 1)] == ["0 2 2.0", "1 2 2.0"]
