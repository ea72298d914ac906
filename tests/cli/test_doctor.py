"""`footplate doctor`, also with a broken torch."""

from __future__ import annotations

import json


def test_a_machine_that_can_train_passes(footplate):
    result = footplate("doctor")
    assert result.code == 0
    assert "Training can work here" in result.out


def test_json_holds_the_findings(footplate):
    document = json.loads(footplate("doctor", "--json").out)
    assert document["ok"] is True
    assert "cpu" in [accelerator["name"] for accelerator in document["accelerators"]]


def test_a_torch_that_cannot_be_imported_is_the_finding(process, tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libgomp.so.1: cannot open shared object file')")
    running = process("doctor", PYTHONPATH=str(tmp_path))
    out, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert err == ""
    assert "problem: torch can't be imported (OSError: libgomp.so.1" in out
    assert "Training can't work here" in out


def test_json_has_the_same_keys_without_torch(process, footplate, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    running = process("doctor", "--json", PYTHONPATH=str(tmp_path))
    document = json.loads(running.communicate(timeout=120)[0])
    assert document["ok"] is False
    assert document.keys() == json.loads(footplate("doctor", "--json").out).keys() - {"torch_threads"}
