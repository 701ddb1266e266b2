"""The file of measured rates: what is kept, for which GPU and versions, and files that are not one of ours."""

import json
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from rptrain.data import cache
from rptrain.engine.optim.adam import default_threads
from rptrain.machine import hardware
from rptrain.machine.rates import FILE, GpuRates, LinkRates, Versions, keep, load, measured_links, measured_rates
from rptrain.schedule.machine import CARDS, CPU, GB, MeasuredRates, Rates

FIRST = GpuRates(
    "aaaa", "NVIDIA RTX 4090", Versions("2.13.0", "13.0"), MeasuredRates(Rates(140, 280, 250), "2026-11-24")
)
DEFAULT_FOLDER = cache.default_folder  # before the tests' own takes its place
SECOND = replace(FIRST, uuid="bbbb", measured=MeasuredRates(Rates(150, 270, 260), "2026-11-23"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty cache folder, which is not there yet, and two GPUs."""
    monkeypatch.setattr(cache, "default_folder", lambda: tmp_path / "cache" / "rptrain")
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    uuids = {"cuda:0": "aaaa", "cuda:1": "bbbb", "cuda:2": "cccc"}

    def properties(device):
        return SimpleNamespace(
            uuid=uuids[device], name="NVIDIA GeForce RTX 4090", total_memory=24 << 30, multi_processor_count=128
        )

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return tmp_path / "cache" / "rptrain"


def test_rates_come_back(folder, caplog):
    assert measured_rates(["cuda:0"]) is None and not folder.exists()
    assert keep([FIRST]) is None
    assert load().gpus == (FIRST,) and measured_rates(["cuda:0"]) == FIRST.measured
    assert [file.name for file in folder.iterdir()] == [FILE], "nothing stays beside it"
    later = replace(FIRST, measured=MeasuredRates(Rates(141, 281), "2026-12-01"))
    other = replace(FIRST, versions=Versions("2.14.0", "13.0"))
    assert keep([SECOND, other]) is None and keep([later]) is None
    assert set(load().gpus) == {later, other, SECOND}
    assert not caplog.records


def test_the_slowest_gpu_sets_the_rates():
    keep([FIRST, SECOND])
    assert measured_rates(["cuda:0", "cuda:1"]) == MeasuredRates(Rates(140, 270, 250), "2026-11-23")
    assert measured_rates(["cuda:1"]) == SECOND.measured
    assert measured_rates(["cuda:0", "cuda:2"]) is None, "one was not measured"
    keep([replace(SECOND, measured=MeasuredRates(Rates(150, 270), "2026-11-23"))])
    found = measured_rates(["cuda:0", "cuda:1"])
    assert found is not None and found.rates.fp8 is None


@pytest.mark.parametrize("versions", [Versions("2.14.0", "13.0"), Versions("2.13.0", "12.9"), Versions("2.13.0", None)])
def test_other_versions_do_not_apply(versions):
    keep([replace(FIRST, versions=versions)])
    assert load().gpus and measured_rates(["cuda:0"]) is None


DAMAGED = {
    "empty": b"",
    "cut": b'{"format": 1, "gpus": [',
    "binary": bytes(range(256)),
    "foreign": b'{"cards": {}}',
    "later": b'{"format": 2, "gpus": []}',
    "list": b"[]",
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_and_replaced(folder, content, caplog):
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert measured_rates(["cuda:0"]) is None
    assert f"{folder / FILE} has unknown content" in caplog.text and "rptrain doctor" in caplog.text
    assert keep([FIRST]) is None and load().gpus == (FIRST,)


@pytest.mark.parametrize("rate", ["0.0", "-3.0", "NaN", "Infinity", '"140"'])
def test_impossible_rates_are_ignored(folder, rate, caplog):
    keep([FIRST, SECOND])
    text = (folder / FILE).read_text()
    assert text.count("140.0") == 1
    (folder / FILE).write_text(text.replace("140.0", rate))
    with caplog.at_level(logging.WARNING):
        assert load().gpus in ((), (SECOND,))  # another type makes the content unknown
    assert caplog.records


def test_a_folder_in_its_place_is_ignored(folder, caplog):
    (folder / FILE).mkdir(parents=True)
    assert load().gpus == () and "cannot be read" in caplog.text
    assert "directory" in (keep([FIRST]) or "").lower()
    assert [file.name for file in folder.iterdir()] == [FILE]


def test_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr(cache, "default_folder", DEFAULT_FOLDER)
    assert measured_rates(["cuda:0"]) is None and "home" in (keep([FIRST]) or "")


def test_machines_take_measured_rates():
    assert hardware.machine(["cuda:0", "cuda:1"]).card == CARDS["rtx4090"]
    keep([FIRST, SECOND])
    found = hardware.machine(["cuda:0", "cuda:1"])
    assert (found.devices, found.card.rates) == (2, Rates(140, 270, 250))
    assert found.card.rates_source == "measured by rptrain doctor on 2026-11-23"
    assert hardware.machine(["cuda:0", "cuda:2"]).card == CARDS["rtx4090"]
    assert hardware.machine(["cpu:0"]).card == CPU


def test_the_file_is_text_that_people_can_read(folder):
    keep([FIRST])
    assert json.loads((folder / FILE).read_text()) == {
        "format": 1,
        "gpus": [
            {
                "uuid": "aaaa",
                "name": "NVIDIA RTX 4090",
                "versions": {"torch": "2.13.0", "cuda": "13.0"},
                "measured": {"rates": {"bf16": 140.0, "fp16": 280.0, "fp8": 250.0}, "date": "2026-11-24"},
            }
        ],
        "links": [],
    }


PAIR = LinkRates(("aaaa", "bbbb"), 24e9, 30e9, "2026-11-25")


def test_links_apply_to_the_gpus_that_were_measured_and_to_some_of_them(folder):
    assert measured_links(["cuda:0"]) is None
    more = LinkRates(("aaaa", "bbbb", "cccc"), 23e9, 31e9, "2026-11-25")
    assert keep([FIRST]) is None and keep(links=[more, PAIR]) is None
    assert load().gpus == (FIRST,) and load().links == (more, PAIR)
    assert measured_links(["cuda:0", "cuda:1"]) == measured_links(["cuda:1"]) == PAIR, "the smallest set"
    assert measured_links(["cuda:2"]) == more
    again = replace(PAIR, together=40e9)
    assert keep(links=[again]) is None and measured_links(["cuda:0"]) == again


def test_machines_take_measured_links():
    keep(links=[PAIR])
    found = hardware.machine(["cuda:0", "cuda:1"])
    assert (found.card.pcie, found.pcie_total, found.link) == (24e9, 30e9, 15e9)
    assert found.links_measured == "2026-11-25"
    assert hardware.machine(["cuda:1"]).link == 24e9
    assert hardware.machine(["cuda:2"]).link == CARDS["rtx4090"].pcie


@pytest.mark.parametrize("changed", [{"alone": 0.0}, {"together": -1.0}])
def test_impossible_links_are_ignored(changed, caplog):
    keep([FIRST], [replace(PAIR, **changed)])
    with caplog.at_level(logging.WARNING):
        assert not load().links
    assert load().gpus == (FIRST,), "these stay"
    assert "impossible rates" in caplog.text


@pytest.mark.parametrize(("cpus", "sockets", "bandwidth"), [(8, 1, 64), (32, 1, 150), (32, 2, 256), (96, 2, 300)])
def test_the_hosts_bandwidth_grows_with_its_cores_and_sockets(cpus, sockets, bandwidth, monkeypatch):
    monkeypatch.setattr(hardware, "cores", lambda: cpus)
    monkeypatch.setattr(hardware.numa, "sockets", lambda: sockets)
    for devices in (["cuda:0"], ["cpu:0"]):
        found = hardware.machine(devices)
        assert (found.host_bandwidth, found.threads) == (bandwidth * GB, default_threads())
        assert hardware.machine(devices, 3).threads == 3


def test_a_file_that_others_may_write_to_is_ignored(folder, caplog):
    keep([FIRST])
    (folder / FILE).chmod(0o664)
    assert load().gpus == () and "may be written by other users (mode 664)" in caplog.text
    assert keep([SECOND]) is None
    assert load().gpus == (SECOND,) and folder.stat().st_mode & 0o777 == 0o700
