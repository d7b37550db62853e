"""Start a function, rather than a script, on several processes: from a notebook, or in a test.

Processes are forked, so that functions of a notebook, closures and what they hold are there without being pickled;
where the system has no safe fork (Windows, macOS) they are spawned, and the function must be importable from a module.

A forked process keeps to one CPU thread: OpenMP's threads do not survive a fork, and the next parallel loop would wait
for them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from accel_state.env import are_libraries_initialized, patch_environment
from accel_state.errors import ConfigurationError
from accel_state.options import CoreOptions, RendezvousOptions, resolve

from .accelerators.registry import find_visible
from .errors import LaunchError
from .tpu_function import is_on_tpu, run_on_tpu

DEFAULT_PORT = "29500"

_ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGQUIT") if hasattr(signal, name))

# What the options of a rendezvous are called as arguments; the others have the names of their flags.
_ARGUMENTS = {
    "--main_process_ip": "master_addr",
    "--main_process_port": "use_port",
    "--machine_rank": "node_rank",
    "--num_machines": "num_nodes",
    "--rdzv_": "rdzv_",
    "--max_restarts": "max_restarts",
    "--monitor_interval": "monitor_interval",
}

# Packages that are known to initialise CUDA when they are imported.
_INITIALISE_CUDA = ("bitsandbytes", "cupy", "pycuda.autoinit", "cudf", "tensorflow")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = DEFAULT_PORT,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run a training function on several processes from a notebook or an interactive session.

    The configuration file is not read: what counts is given here. Interrupting the cell ends all processes.

    Args:
        function: what each process calls. Create the Accelerator, and put things on a GPU, inside it.
        args: its arguments.
        num_processes: processes on this machine. None: one for each visible GPU, or for each core of a TPU; without
            either the function runs in this process.
        mixed_precision: no, fp16 or bf16.
        use_port: port of the machine of rank 0. On a single machine the default means any free port.
        master_addr: address of the machine of rank 0.
        node_rank: rank of this machine.
        num_nodes: machines; the cell is run on each.
        rdzv_backend: how machines meet: static or c10d.
        rdzv_endpoint: HOST:PORT to meet at, instead of ``master_addr`` and ``use_port``.
        rdzv_conf: further settings of the rendezvous.
        rdzv_id: what the machines call this job.
        max_restarts: how often all processes are started again after a failure.
        monitor_interval: seconds between two looks at the processes.
        log_line_prefix_template: what stands before each line that goes to a log file, with ${role_name},
            ${local_rank}, ${rank}.

    Raises:
        ConfigurationError: an argument is not allowed, CUDA or an Accelerator is in use in this process already, or
            this process is itself one of several.
        LaunchError: the function raised in one of the processes, or one died; the message ends with its traceback.
    """
    _check_call(function, args)
    _check_integers(num_nodes=(num_nodes, 1), node_rank=(node_rank, 0))
    if node_rank >= num_nodes:
        raise ConfigurationError(
            f"node_rank={node_rank} with num_nodes={num_nodes}: ranks go from 0 to {num_nodes - 1}."
        )
    precision = CoreOptions.from_mapping({"mixed_precision": mixed_precision}).mixed_precision or "no"
    environment = {"ACCELERATE_MIXED_PRECISION": precision}
    if is_on_tpu():
        _refuse_used_state()
        return run_on_tpu(function, args, num_processes, environment)
    local = _count(num_processes)
    if local == 1 and num_nodes == 1:
        print(f"Launching training in this process, on {'one GPU' if find_visible(os.environ).count else 'the CPU'}.")
        with patch_environment(**environment):
            function(*args)
        return
    _refuse_nested("notebook_launcher")
    _refuse_used_state()
    _refuse_cuda()
    host, port = _endpoint(rdzv_endpoint, master_addr, use_port, num_nodes)
    rendezvous = _rendezvous(
        {
            "machine_rank": node_rank,
            "main_process_ip": host,
            "main_process_port": port,
            "rdzv_backend": rdzv_backend,
            "rdzv_conf": _assignments(rdzv_conf),
            "max_restarts": max_restarts,
            "monitor_interval": monitor_interval,
        }
    )
    if not isinstance(log_line_prefix_template, str | None):
        raise ConfigurationError(
            f"log_line_prefix_template={log_line_prefix_template!r} is not text, such as '[${{rank}}]: '."
        )
    print(f"Launching training on {local} {'GPUs' if find_visible(os.environ).count else 'CPU processes'}.")
    _run(
        function,
        args,
        local,
        num_nodes,
        rendezvous,
        environment,
        line_prefix=log_line_prefix_template,
        run_id=rdzv_id if num_nodes > 1 else None,
    )


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several CPU processes, to see whether it would train on several devices.

    Args:
        function: what each process calls.
        args: its arguments.
        num_processes: how many processes.

    Raises:
        ConfigurationError: ``num_processes`` is below 1, or this process is itself one of several.
        LaunchError: the function raised in one of the processes, or one died; the message ends with its traceback.
    """
    _check_call(function, args)
    local = _count(num_processes)
    _refuse_nested("debug_launcher")
    _run(
        function,
        args,
        local,
        1,
        RendezvousOptions(),
        {"ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"},
    )


class Rank:
    """What one process of a launched function runs; it can be pickled where the function can.

    Args:
        function: the function.
        forked: whether the process is a fork of the launching one.
    """

    def __init__(self, function: Callable[..., Any], forked: bool) -> None:
        self.function = function
        self.forked = forked
        # What torch calls it in its log.
        self.__name__ = self.__qualname__ = getattr(function, "__qualname__", repr(function))

    def __call__(self, *args: Any) -> None:
        """Call the function with shared states of its own, and report how it failed."""
        import torch

        from accel_state.context import isolated

        from .elastic.worker import print_by_line, write_report

        print_by_line()
        if self.forked:
            # What the launching process left to its collector (sockets of a kernel, stores of a former launch) has
            # threads that do not # exist here: to collect it would crash.
            gc.freeze()
            torch.set_num_threads(1)
        try:
            with isolated():
                _FORKS.begin_function()
                self.function(*args)
            _leave_process_group()
            if _FORKS.was_interrupted:
                _end_silently()
        except KeyboardInterrupt:
            _end_by_interrupt()
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            if code in (None, 0):
                # torch knows sys.exit(0), and waits for ever for the result of a function that ends with sys.exit().
                _leave_process_group()
                return
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            write_report(error, code if isinstance(code, int) else 1, with_traceback=True)
            raise


def _end_silently() -> None:
    """End a rank whose function coped with an interrupt: torch would keep it until it hears of the others; the launcher
    waits for it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _end_by_interrupt() -> None:
    """End as Python does that nobody keeps from it: torch takes the exception for a success, and waits for a result
    that never comes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)


class _Forks:
    """Has every process that is forked while ranks are started begin with the signal handlers of a fresh one.

    A fork has the launching process's handlers, and the pipe that wakes its event loop: neither is meant for it. This
    must come before all else there: torch's handler, which it would have, makes an exception of the SIGTERM for a rank
    that has just been forked, and what torch does first in it swallows the exception, so that the launcher would wait
    half a minute for that rank. What comes earlier still has been held back, by the launching process, until here.
    """

    def __init__(self) -> None:
        self._are_ranks = self._is_registered = self._calls_function = False
        self.was_interrupted = False
        """Whether this rank was interrupted."""

    @contextlib.contextmanager
    def are_ranks(self) -> Iterator[None]:
        """Forks of this process are ranks meanwhile."""
        if not self._is_registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._begin)
            self._is_registered = True
        self._are_ranks = True
        try:
            yield
        finally:
            self._are_ranks = False

    def begin_function(self) -> None:
        """From here on an interrupt raises; one that came before does so now."""
        self._calls_function = True
        if self.was_interrupted:
            raise KeyboardInterrupt

    def _begin(self) -> None:
        if not self._are_ranks:
            return
        self._are_ranks = False  # what the rank itself forks later may well keep its handlers
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, self._interrupt)
        signal.set_wakeup_fd(-1)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, *_ENDING))

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.was_interrupted = True
        if self._calls_function:  # else it could be swallowed by what comes before the function
            signal.default_int_handler(number, frame)


_FORKS = _Forks()


def _leave_process_group() -> None:
    # gloo's threads crash the interpreter when they outlive it, now and then; a function that ended has no more use for
    # them.
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()


def _run(
    function: Callable[..., Any],
    args: Sequence[Any],
    local: int,
    num_nodes: int,
    rendezvous: RendezvousOptions,
    environment: Mapping[str, str],
    line_prefix: str | None = None,
    run_id: str | None = None,
) -> None:
    from .elastic.checks import check_rendezvous
    from .elastic.report import describe
    from .elastic.run import Job, run_job

    with _in_words_of_the_call():
        check_rendezvous(rendezvous, num_nodes)
    start_method = "fork" if sys.platform.startswith("linux") else "spawn"
    job = Job(
        entrypoint=Rank(function, start_method == "fork"),
        args=tuple(args),
        local_processes=local,
        num_machines=num_nodes,
        rendezvous=rendezvous,
        start_method=start_method,
        line_prefix=line_prefix,
        run_id=run_id,
        owns_process=False,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    with patch_environment(**environment), _in_words_of_the_call(), _FORKS.are_ranks():
        outcome = run_job(job)
    if outcome.failure is not None:
        raise LaunchError(describe(outcome.failure, outcome.world_size))
    if outcome.exit_code == 130:
        raise KeyboardInterrupt
    if outcome.exit_code > 128:
        raise SystemExit(outcome.exit_code)
    if outcome.exit_code:
        raise LaunchError("the function succeeded on this machine and failed on another; its output there says why.")


def _count(num_processes: int | None) -> int:
    if num_processes is None:
        return max(1, find_visible(os.environ).count)
    _check_integers(num_processes=(num_processes, 1))
    return num_processes


def _check_call(function: object, args: object) -> None:
    """Refuse here what would fail in every process, after they have all been started."""
    if not callable(function):
        raise ConfigurationError(
            f"function={function!r} is not a function. Give its name, without calling it: launcher(train, args)."
        )
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise ConfigurationError(
            f"args={args!r} is not a tuple or list of arguments. For a single one: args=({args!r},)."
        )


def _check_integers(**given: tuple[object, int]) -> None:
    """Check numbers, each given as its value and the least that is allowed."""
    for name, (value, least) in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}={value!r} is not an integer of at least {least}.")


def _assignments(rdzv_conf: Mapping[str, Any] | None) -> str:
    if not isinstance(rdzv_conf, Mapping | None):
        raise ConfigurationError(f'rdzv_conf={rdzv_conf!r} is not a mapping, such as {{"timeout": 600}}.')
    return ",".join(f"{key}={value}" for key, value in (rdzv_conf or {}).items())


def _endpoint(rdzv_endpoint: str, master_addr: str, use_port: str | int, num_nodes: int) -> tuple[str, str]:
    if rdzv_endpoint:
        host, _, port = rdzv_endpoint.rpartition(":")
        return (host.strip("[]") or port), (port if host else DEFAULT_PORT)
    return master_addr, "0" if num_nodes == 1 and str(use_port) == DEFAULT_PORT else str(use_port)


def _rendezvous(values: Mapping[str, Any]) -> RendezvousOptions:
    with _in_words_of_the_call():
        return resolve([RendezvousOptions], values, environ={}).group(RendezvousOptions)


@contextlib.contextmanager
def _in_words_of_the_call() -> Iterator[None]:
    """What errors call an option of ``accel launch`` has another name as an argument of the function that was called."""
    try:
        yield
    except ConfigurationError as error:
        text = str(error)
        for flag, name in _ARGUMENTS.items():
            text = text.replace(flag, name)
        raise ConfigurationError(text) from None


def _refuse_nested(name: str) -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise ConfigurationError(
            f"{name} is called in a process that already is rank {distributed.get_rank()} of "
            f"{distributed.get_world_size()}. "
            "Call it in a process that belongs to no process group, or call the function itself."
        )


def _refuse_used_state() -> None:
    from accel_state.context import current

    if current().process:
        raise ConfigurationError(
            "an Accelerator (or PartialState) exists already in this session, for a single process. Create it only "
            "inside the function "
            "that is launched, and restart the session before launching again."
        )


def _refuse_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    raise ConfigurationError(
        "CUDA is initialised in this session already, so processes forked from it could not use it. "
        f"{_culprits(vars(sys.modules['__main__']))} Restart the session, and use the GPU only inside the function "
        "that is launched."
    )


def _culprits(namespace: Mapping[str, Any]) -> str:
    """Who may have initialised CUDA: what of the session lives on a GPU, and packages that do it when imported."""
    on_gpu = [name for name, value in namespace.items() if not name.startswith("_") and _is_on_gpu(value)]
    packages = are_libraries_initialized(*_INITIALISE_CUDA)
    found = [f"On a GPU: {', '.join(on_gpu)}."] if on_gpu else []
    found += [f"Imported packages that initialise CUDA: {', '.join(packages)}."] if packages else []
    return " ".join(found) or "Some call, such as torch.cuda.get_device_name() or .to('cuda'), did it."


def _is_on_gpu(value: Any) -> bool:
    import torch

    if isinstance(value, torch.nn.Module):
        return any(parameter.is_cuda for parameter in value.parameters())
    return isinstance(value, torch.Tensor) and value.is_cuda
