"""Starts a function on several processes, from a notebook or in a test.

On Linux processes are forked, so functions of a notebook, closures and their variables need not be pickled. Elsewhere,
where forking is not safe, they are spawned, and the function must be importable from a module. A forked process uses a
single CPU thread: OpenMP's threads do not survive a fork, and the next parallel loop would wait for them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from accel_state.env import are_libraries_initialized, patch_environment, read_str
from accel_state.errors import ConfigurationError
from accel_state.options import CoreOptions, RendezvousOptions, ResourceOptions, resolve
from accel_state.ports import loopback_variables

from .accelerators.registry import find_visible
from .cpus import check_process_count
from .errors import LaunchError
from .supervisor import SIGNALS
from .tpu_function import is_on_tpu, run_on_tpu

DEFAULT_PORT = "29500"

# Arguments whose names differ from the flags that errors mention.
_ARGUMENTS = {
    "--main_process_ip": "master_addr",
    "--main_process_port": "use_port",
    "--machine_rank": "node_rank",
    "--num_machines": "num_nodes",
    "--num_processes": "num_processes",
    "--rdzv_": "rdzv_",
    "--max_restarts": "max_restarts",
    "--monitor_interval": "monitor_interval",
}

# Packages that initialise CUDA when they are imported.
_INITIALISE_CUDA = ("bitsandbytes", "cupy", "pycuda.autoinit", "cudf", "tensorflow", "torchao")


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

    The configuration file is not read. Interrupting the cell ends all processes.

    Args:
        function: called in each process. Create the Accelerator, and move data to a GPU, inside it.
        args: its arguments.
        num_processes: processes on this machine. None: one per visible GPU, or per core of a TPU; without either, the
            function runs in this process.
        mixed_precision: no, fp16, bf16 or fp8; overrides ACCELERATE_MIXED_PRECISION, with a warning.
        use_port: port of the machine of rank 0. On a single machine the default means any free port.
        master_addr: address of the machine of rank 0.
        node_rank: rank of this machine.
        num_nodes: number of machines; run the cell on each.
        rdzv_backend: how machines meet: static or c10d.
        rdzv_endpoint: HOST:PORT to meet at; overrides ``master_addr`` and ``use_port``.
        rdzv_conf: further settings of the rendezvous.
        rdzv_id: id of the job, the same on all machines.
        max_restarts: how often all processes are started again after a failure.
        monitor_interval: seconds between two checks of the processes.
        log_line_prefix_template: prefix of each line in a log file, with ${role_name}, ${local_rank}, ${rank}.

    Raises:
        ConfigurationError: an argument is not allowed, CUDA or an Accelerator is in use in this process already, or
            this process is itself a rank.
        LaunchError: the function raised in one of the processes, or one died; the message ends with its traceback.
    """
    _check_call(function, args)
    _check_integers(num_nodes=(num_nodes, 1), node_rank=(node_rank, 0))
    if node_rank >= num_nodes:
        raise ConfigurationError(
            f"node_rank={node_rank} with num_nodes={num_nodes}: ranks go from 0 to {num_nodes - 1}."
        )
    precision = CoreOptions.from_mapping({"mixed_precision": mixed_precision}).mixed_precision or "no"
    environment = _precision_variable(precision)
    host, port = master_addr, str(use_port)
    if rdzv_endpoint:
        host, _, port = rdzv_endpoint.rpartition(":")
        host, port = (host.strip("[]"), port) if host else (port, DEFAULT_PORT)
    elif num_nodes == 1 and port == DEFAULT_PORT:
        port = "0"
    if not isinstance(rdzv_conf, Mapping | None):
        raise ConfigurationError(f'rdzv_conf={rdzv_conf!r} is not a mapping, such as {{"timeout": 600}}.')
    values = {
        "machine_rank": node_rank,
        "main_process_ip": host,
        "main_process_port": port,
        "rdzv_backend": rdzv_backend,
        "rdzv_conf": ",".join(f"{key}={value}" for key, value in (rdzv_conf or {}).items()),
        "max_restarts": max_restarts,
        "monitor_interval": monitor_interval,
    }
    with _argument_names_in_errors():
        rendezvous = resolve([RendezvousOptions], values, environ={}).group(RendezvousOptions)
    if not isinstance(log_line_prefix_template, str | None):
        raise ConfigurationError(
            f"log_line_prefix_template={log_line_prefix_template!r} is not text, such as '[${{rank}}]: '."
        )
    if is_on_tpu():
        _refuse_existing_state()
        return run_on_tpu(function, args, num_processes, environment)
    local = _process_count(num_processes)
    has_gpus = find_visible(os.environ).count > 0
    if local == 1 and num_nodes == 1:
        print(f"Launching training in this process, on {'one GPU' if has_gpus else 'the CPU'}.")
        with patch_environment(**environment):
            function(*args)
        return
    _refuse_nested("notebook_launcher")
    _refuse_existing_state()
    _refuse_cuda()
    print(f"Launching training on {local} {'GPUs' if has_gpus else 'CPU processes'}.")
    run_id = rdzv_id if num_nodes > 1 else None
    _run(function, args, local, num_nodes, rendezvous, environment, log_line_prefix_template, run_id)


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> None:
    """Run a function on several CPU processes, to test code for several devices.

    Args:
        function: called in each process.
        args: its arguments.
        num_processes: number of processes.

    Raises:
        ConfigurationError: ``num_processes`` is below 1, or this process is itself a rank.
        LaunchError: the function raised in one of the processes, or one died; the message ends with its traceback.
    """
    _check_call(function, args)
    local = _process_count(num_processes)
    _refuse_nested("debug_launcher")
    environment = {"ACCELERATE_USE_CPU": "true", **_precision_variable("no")}
    _run(function, args, local, 1, RendezvousOptions(), environment)


def _precision_variable(precision: str) -> dict[str, str]:
    """Return the variable of the precision, and warn if it replaces another one of this process."""
    before = CoreOptions.read("mixed_precision")
    if before not in (None, precision):
        warnings.warn(
            f"ACCELERATE_MIXED_PRECISION={before} has no effect: the function runs with mixed_precision={precision!r}. "
            f"Pass notebook_launcher(..., mixed_precision={before!r}) to change it.",
            stacklevel=3,
        )
    return {"ACCELERATE_MIXED_PRECISION": precision}


class FunctionRank:
    """What each process runs. Can be pickled if the function can.

    Args:
        function: the function.
        forked: whether the process is a fork of the launching one.
    """

    def __init__(self, function: Callable[..., Any], forked: bool) -> None:
        self.function = function
        self.forked = forked

    def __call__(self, *args: Any) -> None:
        """Call the function with a process state of its own, and report a failure."""
        import torch

        from accel_state.context import isolated

        from .elastic.worker import note_end, print_by_line, write_report

        print_by_line()
        if self.forked:
            # Garbage of the launching process (sockets of a kernel, stores of a former launch) belongs to threads that
            # do not exist here; collecting it would crash.
            gc.freeze()
            torch.set_num_threads(1)
        try:
            with isolated():
                _FORKED_RANKS.begin_function()
                self.function(*args)
            note_end()
            _destroy_process_group()
        except KeyboardInterrupt:
            # The default action ends the process, so that the launcher sees why.
            _flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        except BaseException as error:
            code = error.code if isinstance(error, SystemExit) else 1
            if code in (None, 0):
                _destroy_process_group()
                return
            if error.__traceback__ is not None:
                error.__traceback__ = error.__traceback__.tb_next
            write_report(error, code if isinstance(code, int) else 1, with_traceback=True)
            raise


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


class _ForkedRanks:
    """Resets signal handling in forked ranks, before anything else runs there.

    A fork inherits the launching process's handlers and the pipe that wakes its event loop. With torch's inherited
    handler, a SIGTERM to a rank that has just been forked becomes an exception that torch swallows, and the launcher
    waits half a minute for that rank. Signals that arrive earlier are blocked by the launching process until here.
    """

    def __init__(self) -> None:
        self._starting_ranks = self._is_registered = self._in_function = False
        self.was_interrupted = False
        """Whether this rank was interrupted."""

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While the context is active, forks of this process are ranks."""
        if not self._is_registered and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._reset_signals)
            self._is_registered = True
        self._starting_ranks = True
        try:
            yield
        finally:
            self._starting_ranks = False

    def begin_function(self) -> None:
        """Raise on interrupts from here on, and for one that came before."""
        self._in_function = True
        if self.was_interrupted:
            raise KeyboardInterrupt

    def _reset_signals(self) -> None:
        if not self._starting_ranks:
            return
        self._starting_ranks = False  # forks of the rank keep its handlers
        for number in SIGNALS:
            signal.signal(number, self._interrupt if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self.was_interrupted = True
        if self._in_function:  # code before the function could swallow the exception
            signal.default_int_handler(number, frame)


_FORKED_RANKS = _ForkedRanks()


def _destroy_process_group() -> None:
    # gloo's threads sometimes crash the interpreter if they outlive it.
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
    from .elastic.meeting import ElasticJob
    from .elastic.report import describe
    from .elastic.run import run_job

    with _argument_names_in_errors():
        check_rendezvous(rendezvous, num_nodes)
    if num_nodes == 1:
        unset = {name: value for name, value in loopback_variables().items() if not read_str(name)}
        environment = {**environment, **unset}
    start_method = "fork" if sys.platform.startswith("linux") else "spawn"
    job = ElasticJob(
        entrypoint=FunctionRank(function, start_method == "fork"),
        args=tuple(args),
        local_processes=local,
        num_machines=num_nodes,
        rendezvous=rendezvous,
        start_method=start_method,
        line_prefix=line_prefix,
        run_id=run_id,
        owns_process=False,
    )
    _flush()
    with patch_environment(**environment), _argument_names_in_errors(), _FORKED_RANKS.starting():
        outcome = run_job(job)
    if outcome.failure is not None:
        raise LaunchError(describe(outcome.failure, outcome.world_size))
    if outcome.exit_code == 130:
        raise KeyboardInterrupt
    if outcome.exit_code > 128:
        raise SystemExit(outcome.exit_code)
    if outcome.exit_code:
        raise LaunchError("the function succeeded on this machine and failed on another; see the output there.")


def _process_count(num_processes: int | None) -> int:
    devices = find_visible(os.environ).count
    if num_processes is None:
        return max(1, devices)
    _check_integers(num_processes=(num_processes, 1))
    if not ResourceOptions.read("oversubscribe"):
        variable = ResourceOptions.declaration("oversubscribe").env
        check_process_count(num_processes, devices, f"num_processes={num_processes}", f"set {variable}=true")
    return num_processes


def _check_call(function: object, args: object) -> None:
    """Refuse here what would fail in every process."""
    if not callable(function):
        raise ConfigurationError(
            f"function={function!r} is not a function. Pass it without calling it: launcher(train, args)."
        )
    if isinstance(args, str | bytes | Mapping) or not isinstance(args, Iterable):
        raise ConfigurationError(
            f"args={args!r} is not a tuple or list of arguments. For a single one: args=({args!r},)."
        )


def _check_integers(**given: tuple[object, int]) -> None:
    """Check arguments, each given as its value and its minimum."""
    for name, (value, minimum) in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ConfigurationError(f"{name}={value!r} is not an integer of at least {minimum}.")


@contextlib.contextmanager
def _argument_names_in_errors() -> Iterator[None]:
    """Replace flags of ``accel launch`` in errors by the arguments of the called function."""
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
            f"{name} is called in a process that is rank {distributed.get_rank()} of {distributed.get_world_size()}. "
            "Call it in a process without a process group, or call the function itself."
        )


def _refuse_existing_state() -> None:
    from accel_state.context import current

    if current().process:
        raise ConfigurationError(
            "an Accelerator (or PartialState) exists already in this session, for a single process. Create it only "
            "inside the launched function, and restart the session before launching again."
        )


def _refuse_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    raise ConfigurationError(
        "CUDA is initialised in this session already, so processes forked from it could not use it. "
        f"{_cuda_users(vars(sys.modules['__main__']))} Restart the session, and use the GPU only inside the launched "
        "function."
    )


def _cuda_users(namespace: Mapping[str, Any]) -> str:
    """Return what may have initialised CUDA: variables of the session on a GPU, and imported packages."""
    on_gpu = [name for name, value in namespace.items() if not name.startswith("_") and _is_on_gpu(value)]
    packages = are_libraries_initialized(*_INITIALISE_CUDA)
    causes = [f"On a GPU: {', '.join(on_gpu)}."] if on_gpu else []
    causes += [f"Imported packages that initialise CUDA: {', '.join(packages)}."] if packages else []
    return " ".join(causes) or "A call such as torch.cuda.get_device_name() or .to('cuda') did it."


def _is_on_gpu(value: Any) -> bool:
    import torch

    if isinstance(value, torch.nn.Module):
        return any(parameter.is_cuda for parameter in value.parameters())
    return isinstance(value, torch.Tensor) and value.is_cuda
