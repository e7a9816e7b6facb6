"""Fixtures for all tests: the device, seeds, threads, NaN in uninitialised memory, and no network."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from rooftile.exact import dispatch
from tests import crashes

# the same examples in every run, and no deadline: a slow machine must not fail tests
settings.register_profile("cpu", deadline=None, derandomize=True)
# every example may compile its own kernels
settings.register_profile("cuda", parent=settings.get_profile("cpu"), max_examples=10)
settings.load_profile("cpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the conformance suite runs")


@pytest.hookimpl(trylast=True)  # pytest has a place for traces of its own, which comes first
def pytest_configure(config: pytest.Config) -> None:
    crashes.configure(config)
    settings.load_profile(config.getoption("device"))
    # most problems here are so small that a second thread only waits, and takes a core from another worker
    torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    has_hopper = has_gpu and torch.cuda.get_device_capability() == (9, 0)
    if config.getoption("device") == "cuda" and not has_gpu:
        raise pytest.UsageError("--device cuda: torch finds no CUDA device here")
    for item in items:
        if not has_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if not has_hopper and item.get_closest_marker("sm90"):
            item.add_marker(pytest.mark.skip(reason="needs a Hopper GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test that takes `backend` once per backend; under Triton's interpreter, once for `triton`."""
    if "backend" in metafunc.fixturenames:
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        metafunc.parametrize("backend", ["triton"] if interpreted else list(dispatch.BACKENDS))


# a test that takes longer waits for what never comes, such as a process that hangs
PATIENCE_S = 600


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Ends a test that hangs, with the place where it waits."""
    if not hasattr(signal, "SIGALRM"):
        return (yield)

    def end(*unused: object) -> None:
        raise TimeoutError(f"{item.nodeid} took more than {PATIENCE_S} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(PATIENCE_S)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Returns the device of this run's tensors, from --device."""
    return torch.device(request.config.getoption("device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    # torch.manual_seed formats the stack for every backend that is not initialised, which takes longer than many tests
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


def _filled(allocate):
    def allocate_nan(*args, **kwargs):
        x = allocate(*args, **kwargs)
        # a compiled program manages its own memory
        if torch.compiler.is_compiling() or not x.is_floating_point():
            return x
        with torch.no_grad():
            return x.fill_(float("nan"))

    return allocate_nan


# the same functions in every test: Dynamo remembers those that it meets first, and asks for a rule for any other
_FILLED = [
    (owner, name, _filled(getattr(owner, name)))
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    )
]


@pytest.fixture(autouse=True)
def _nan_in_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch.empty and its relatives return NaN, so that an output that a kernel does not write is not zero by chance."""
    for owner, name, allocate in _FILLED:
        monkeypatch.setattr(owner, name, allocate)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that uses the network."""
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test tried to reach {address}; tests use this machine only")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
