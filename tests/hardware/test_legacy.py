import linecache
import warnings

import pytest

from footplate.core.errors import ConfigError
from footplate.hardware.cpu import CPU
from footplate.hardware.cuda import CUDA
from footplate.hardware.legacy import modernise


def _modernise(accelerator="auto", devices="auto", precision=None, gpus=None, tpu_cores=None, environ=None):
    return modernise(accelerator, devices, precision, gpus, tpu_cores, environ or {})


def test_todays_spelling_comes_back_as_it_is_and_silently():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert _modernise("cuda", [0, 2], "16-mixed") == ("cuda", [0, 2], "16-mixed")
        assert _modernise() == ("auto", "auto", None)


@pytest.mark.parametrize(
    ("old", "new", "spelling"),
    [
        ({"gpus": 2}, ("gpu", 2, None), 'gpus=2 is an older spelling of accelerator="gpu", devices=2.'),
        ({"gpus": -1}, ("gpu", -1, None), 'accelerator="gpu", devices=-1.'),
        ({"gpus": [0, 3]}, ("gpu", [0, 3], None), 'accelerator="gpu", devices=[0, 3].'),
        ({"gpus": "0,3"}, ("gpu", "0,3", None), "devices='0,3'."),
        ({"gpus": 0}, ("cpu", "auto", None), 'gpus=0 is an older spelling of accelerator="cpu".'),
        ({"gpus": []}, ("cpu", "auto", None), 'accelerator="cpu".'),
        ({"gpus": 1, "accelerator": "cuda"}, ("cuda", 1, None), 'accelerator="cuda", devices=1.'),
        ({"gpus": 0, "accelerator": "cpu"}, ("cpu", "auto", None), 'accelerator="cpu".'),
        ({"tpu_cores": 1}, ("tpu", 1, None), 'accelerator="tpu", devices=1.'),
        ({"tpu_cores": 8}, ("tpu", 8, None), 'tpu_cores=8 is an older spelling of accelerator="tpu", devices=8.'),
        ({"tpu_cores": [5]}, ("tpu", [5], None), 'accelerator="tpu", devices=[5].'),
        ({"tpu_cores": "8", "accelerator": "tpu"}, ("tpu", "8", None), "devices='8'."),
        ({"environ": {"XLA_USE_BF16": "1"}}, ("auto", "auto", "bf16-true"), 'XLA_USE_BF16=1 is an older spelling of'),
    ],
)  # fmt: skip
def test_an_older_spelling_means_what_it_meant_and_shows_todays_in_one_line(old, new, spelling):
    with pytest.warns(FutureWarning) as caught:
        assert _modernise(**old) == new

    (warning,) = caught
    assert spelling in str(warning.message)
    assert "\n" not in str(warning.message)


def test_an_instance_of_a_gpu_accelerator_goes_with_gpus():
    cuda = CUDA()

    with pytest.warns(FutureWarning, match='accelerator="cuda", devices=2'):
        assert _modernise(cuda, gpus=2) == (cuda, 2, None)


def test_two_older_spellings_cost_a_line_each():
    with pytest.warns(FutureWarning) as caught:
        assert _modernise(tpu_cores=8, environ={"XLA_USE_BF16": "1"}) == ("tpu", 8, "bf16-true")

    assert len(caught) == 2


@pytest.mark.parametrize("environ", [{"XLA_USE_BF16": "0"}, {"XLA_USE_BF16": ""}, {}])
def test_the_environment_without_xla_use_bf16_changes_nothing(environ):
    assert _modernise(environ=environ) == ("auto", "auto", None)


def test_an_explicit_precision_overrules_the_environment():
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        assert _modernise(precision="32-true", environ={"XLA_USE_BF16": "1"}) == ("auto", "auto", "32-true")


@pytest.mark.parametrize(
    ("both", "words"),
    [
        ({"gpus": 2, "devices": 2}, "gpus=2 and devices=2 are both given"),
        ({"gpus": 0, "devices": 2}, "gpus=0 and devices=2 are both given"),
        ({"tpu_cores": 8, "devices": 4}, "tpu_cores=8 and devices=4 are both given"),
        ({"gpus": 2, "tpu_cores": 8}, "gpus=2 and tpu_cores=8 are both given"),
        ({"gpus": 2, "accelerator": "cpu"}, 'gpus=2 contradicts accelerator="cpu"'),
        ({"gpus": 2, "accelerator": CPU()}, 'gpus=2 contradicts accelerator="cpu"'),
        ({"gpus": 0, "accelerator": "gpu"}, 'gpus=0 contradicts accelerator="gpu"'),
        ({"tpu_cores": 8, "accelerator": "cuda"}, 'tpu_cores=8 contradicts accelerator="cuda"'),
    ],
)
def test_what_is_said_twice_is_refused(both, words):
    with pytest.raises(ConfigError, match=words):
        _modernise(**both)


def test_the_warning_points_at_the_line_of_the_script():
    class Trainer:
        def __init__(self, gpus=None, environ=None):
            _ = modernise("auto", "auto", None, gpus, None, environ or {})

    with pytest.warns(FutureWarning) as from_argument:
        Trainer(gpus=1)
    with pytest.warns(FutureWarning) as from_environment:
        Trainer(environ={"XLA_USE_BF16": "1"})

    lines = [linecache.getline(caught[0].filename, caught[0].lineno) for caught in (from_argument, from_environment)]
    assert [line.strip() for line in lines] == ["Trainer(gpus=1)", 'Trainer(environ={"XLA_USE_BF16": "1"})']
