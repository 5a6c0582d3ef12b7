"""Our side of scripts.bench_train: the training of a recipe, as `recsys train` runs it, a few steps at a time.

    [torchrun ...] -m scripts.bench_train_ours RECIPE [key=value ...]

Reader thread, encoder, sharded model, optimizer and pipeline are those of a run; what is left out is what happens
between epochs. Answers: `train`, rows per second over some steps; `breakdown`, where a step's time goes; `products`,
how long the matrix products of the dense layers take by themselves. With several ranks, rank 0 listens for all.
"""

import argparse
import collections
import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

from recsys import recipe_file
from recsys.distributed import Ranks, broadcast, gather, process_group
from recsys.encoder import Encoder
from recsys.stack import require_stack
from scripts.contest import median, open_channel, peak_bytes, serve, timed

KINDS = {
    "communication": (
        *("all2all", "alltoall", "all_to_all", "allreduce", "all_reduce", "reducescatter", "reduce_scatter"),
        *("allgather", "all_gather", "c10d::", "gloo:", "splits_dist", "input_dist", "output_dist", "kjt", "awaitable"),
    ),
    "table kernels": ("fbgemm::split_embedding", "fbgemm::dense_embedding", "splitlookupfunction"),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn"),
    "optimizer": ("optimizer.step", "aten::_fused_ad", "aten::_foreach"),
    "copies and fills": ("aten::copy_", "aten::cat", "aten::fill_", "aten::zero_", "aten::add_", "aten::index"),
}
"""Kind of work -> what the names of torch.profiler's events begin with or contain; the first that fits counts."""
_PROFILED_STEPS = 5


def main() -> None:
    """Set the training up and answer."""
    channel = open_channel()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    require_stack()
    recipe = recipe_file.load(options.recipe, options.overrides)
    with process_group(recipe.train.device, threads=recipe.train.threads_per_rank) as ranks:
        training = _Training(recipe, ranks)
        questions: dict[str, Callable[..., Any]] = {
            "train": training.train,
            "breakdown": training.breakdown,
            "products": training.products,
        }
        if ranks.rank == 0:

            def asked(question: str) -> Callable[..., Any]:
                def answer(**arguments: Any) -> Any:
                    broadcast((question, arguments))
                    return questions[question](**arguments)

                return answer

            serve(channel, {question: asked(question) for question in questions})
            broadcast(None)
        else:
            while (question := broadcast(None)) is not None:
                questions[question[0]](**question[1])
        training.batches.close()


class _Training:
    """One rank of a run that goes on as long as it is asked to."""

    def __init__(self, recipe: Any, ranks: Ranks) -> None:
        from torchrec.distributed.train_pipeline import TrainPipelineBase

        from recsys.job import Data, assemble
        from recsys.survey import survey

        self.ranks = ranks
        encoder = Encoder(recipe)
        data = Data.open(recipe, encoder, ranks)
        survey(data)
        reader = data.reader("train", shuffle_rows=recipe.data.shuffle_rows)
        self.num_rows = sum(reader.epoch(0).rows_by_rank(0))
        self.input = _InputTimes(encoder)
        self.batches = data.batches(reader, itertools.count(1))
        self.job = assemble(recipe, ranks, encoder)
        self.optimizer = self.job.optimizer()
        self.job.task.train()
        self.pipeline = TrainPipelineBase(self.job.task, self.optimizer, ranks.device)
        self.shapes: list[tuple[int, int, int]] = []

    def train(self, seconds: float) -> dict[str, Any]:
        """Rows per second of all ranks together, over so many steps that they take some time."""
        first = timed(lambda _: self.pipeline.progress(self.batches), seconds=0, least=3)
        num_steps = broadcast(max(4, math.ceil(seconds / median(first))))
        self.input.start()
        start_s, waited_s = time.perf_counter(), self.batches.waited_s
        for _ in range(num_steps):
            loss, _ = self.pipeline.progress(self.batches)
        elapsed_s = time.perf_counter() - start_s
        assert math.isfinite(float(loss)), "a diverged training may be faster than one that learns"
        return {
            "rows_per_s": median([self.num_rows * num_steps / elapsed_s]),
            "step_s": median([elapsed_s / num_steps]),
            "reader_wait_share": round((self.batches.waited_s - waited_s) / elapsed_s, 4),
            "input_cpu_ms": self.input.stop(),
            "peak_bytes": sum(gather(peak_bytes())),
        }

    def breakdown(self, steps: int) -> dict[str, Any]:
        """Milliseconds of a step by phase and by kind of work."""
        spent: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(steps):
            with _Clock(spent["reader wait"]):
                batch = next(self.batches)
            with _Clock(spent["forward"]):
                self.optimizer.zero_grad()
                loss, _ = self.job.task(batch)
            with _Clock(spent["backward, tables updated"]):
                loss.backward()
            with _Clock(spent["optimizer of the dense layers"]):
                self.optimizer.step()
        phases = {name: median(values, 3) for name, values in spent.items()}
        return {"phases_ms": phases, "kinds_ms": self._kinds()}

    def _kinds(self) -> dict[str, float]:
        """Milliseconds of a step by kind of work, as torch.profiler sees the calling threads."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(_PROFILED_STEPS):
                self.pipeline.progress(self.batches)
        spent: dict[str, float] = collections.defaultdict(float)
        for event in profiler.key_averages():
            spent[_kind(event.key)] += event.self_cpu_time_total / 1e3 / _PROFILED_STEPS
        return {kind: round(spent[kind], 2) for kind in [*KINDS, "other"]}

    def products(self, seconds: float, dtype: str) -> dict[str, float]:
        """Time of the products of all dense layers for a batch, forward and both of the way back, and their rate."""
        if not self.shapes:
            with _LinearShapes() as found:
                self.pipeline.progress(self.batches)
            self.shapes = found.shapes
        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        operands = [
            tuple(torch.randn(a, b).to(kind) for a, b in ((rows, width), (out, width), (rows, out)))
            for rows, width, out in self.shapes
        ]

        def step(_: int) -> None:
            for x, weight, gradient in operands:
                functional.linear(x, weight)
                gradient @ weight
                gradient.t() @ x

        step_s = median(timed(step, seconds=seconds))
        flops = sum(6 * rows * width * out for rows, width, out in self.shapes)
        return {"step_s": step_s, "gflop_per_s": median([flops / step_s / 1e9])}


class _Clock(contextlib.AbstractContextManager["_Clock"]):
    """Adds the milliseconds that a block takes to a list."""

    def __init__(self, spent: list[float]) -> None:
        self.spent = spent

    def __enter__(self) -> "_Clock":
        self.start_s = time.perf_counter()
        return self

    def __exit__(self, *_: Any) -> None:
        self.spent.append(1e3 * (time.perf_counter() - self.start_s))


class _InputTimes:
    """CPU time of the input: what the reader's thread takes, encoding included, and what the training thread adds."""

    def __init__(self, encoder: Encoder) -> None:
        self.spent_s = {"read": 0.0, "encode": 0.0, "batch": 0.0}
        self.num_batches = 0
        encode, batch = encoder.encode_rows, encoder.batch

        def encode_rows(*arguments: Any, **options: Any) -> Any:
            with self._adding("encode"):
                found = encode(*arguments, **options)
            self.spent_s["read"] = time.thread_time() - self.spent_s["encode"]
            return found

        def batched(*arguments: Any) -> Any:
            self.num_batches += 1
            with self._adding("batch"):
                return batch(*arguments)

        replaced: Any = encoder
        replaced.encode_rows, replaced.batch = encode_rows, batched

    @contextlib.contextmanager
    def _adding(self, name: str) -> Iterator[None]:
        start_s = time.thread_time()
        yield
        self.spent_s[name] += time.thread_time() - start_s

    def start(self) -> None:
        """Forget what was before."""
        self._before = (dict(self.spent_s), self.num_batches)

    def stop(self) -> dict[str, float]:
        """Milliseconds per batch since `start`."""
        before, num_batches = self._before
        per_batch = 1e3 / max(self.num_batches - num_batches, 1)
        return {name: round((spent_s - before[name]) * per_batch, 2) for name, spent_s in self.spent_s.items()}


class _LinearShapes(TorchFunctionMode):
    """Notes (rows, inputs, outputs) of every linear layer that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int, int]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.linear:
            x, weight = args[0], args[1]
            assert isinstance(x, Tensor) and isinstance(weight, Tensor), "layers of a model compute with tensors"
            self.shapes.append((x.numel() // x.shape[-1], x.shape[-1], weight.shape[0]))
        return function(*args, **(kwargs or {}))


def _kind(event: str) -> str:
    name = event.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


if __name__ == "__main__":
    main()
