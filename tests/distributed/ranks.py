"""Runs a function of a test on several gloo ranks, each a process of this machine."""

import multiprocessing
import tempfile
import traceback
from datetime import timedelta

LIMIT_S = 90
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed.tensor", "goldsmith.mhc", "goldsmith.router", "goldsmith.experts"])


def on_ranks(world, function, *args):
    """The results of function(rank, *args) on every rank, in order. Raises AssertionError with the first traceback."""
    with tempfile.NamedTemporaryFile() as store:
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _CONTEXT.Process(target=_run, args=(rank, world, store.name + ".ranks", pipe[1], function, args))
            for rank, pipe in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        for _, end in pipes:
            end.close()
        results = []
        for rank, (pipe, _) in enumerate(pipes):
            try:
                results.append(pipe.recv() if pipe.poll(LIMIT_S) else ("late", f"rank {rank}: no answer in {LIMIT_S} s"))
            except EOFError:
                results.append(("dead", f"rank {rank} ended without an answer"))
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
    failures = [text for status, text in results if status != "done"]
    assert not failures, "\n".join(failures)
    return [value for _, value in results]


def _run(rank, world, store, pipe, function, args):
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S)
        )
        pipe.send(("done", function(rank, *args)))
    except BaseException:
        pipe.send(("failed", f"rank {rank}:\n{traceback.format_exc()}"))
    finally:
        pipe.close()
        if distributed.is_initialized():
            distributed.destroy_process_group()
