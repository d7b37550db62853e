"""The private names of torch that accel_launch/_torch_compat.py uses still exist and are still called."""

from __future__ import annotations

import inspect

import pytest
from torch.distributed.elastic import multiprocessing
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing import tail_log
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

AGENT = inspect.getsource(api) + inspect.getsource(LocalElasticAgent)


@pytest.mark.parametrize(
    "name", ["_start_workers", "_monitor_workers", "_rendezvous", "_shutdown", "_exit_barrier", "_construct_event"]
)
def test_the_agent_calls_its_hooks(name: str) -> None:
    assert hasattr(LocalElasticAgent, name) and f"self.{name}(" in AGENT


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("self._remaining_restarts", AGENT),
        ("self._pcontext", AGENT),
        *((f"self.{name}", inspect.getsource(processes.MultiprocessContext)) for name in ("_pc", "_ret_vals")),
        ("self._return_values", inspect.getsource(processes.MultiprocessContext)),
        ("_terminate_process_handler", inspect.getsource(processes)),
        ("get_subprocess_handler(", inspect.getsource(processes.SubprocessContext._start)),
        ("self.subprocess_handlers", inspect.getsource(processes.SubprocessContext._close)),
        ("= SubprocessContext(", inspect.getsource(multiprocessing.start_processes)),
        ("TailLog(", inspect.getsource(processes)),
        ("self._finished_events", inspect.getsource(tail_log.TailLog)),
        ("_shared_tcp_store_server", inspect.getsource(dynamic_rendezvous)),
        ("_bootstrap_store_info", inspect.getsource(dynamic_rendezvous)),
    ],
)
def test_private_attributes_exist(name: str, source: str) -> None:
    assert name in source
