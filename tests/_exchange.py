"""Worker of the communication tests: train models on two ranks, one after another, and keep what they sent.

    torchrun --nproc-per-node 2 tests/_exchange.py CONFIG.json

CONFIG has `output`, a folder, and `cases`: name -> {recipe, overrides, steps, cut, weight, pipeline}. Rank r writes
`NAME.r.pt` for each case; `run` tells what is in it.
"""

import itertools
import json
import pathlib
import sys

import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsys import recipe_file
from recsys.data.batch import Batch
from recsys.distributed import Ranks, process_group
from recsys.embedding import Embeddings
from recsys.job import Job, assemble
from recsys.stack import require_stack
from scripts.count_bytes import Collectives
from tests._train_batches import random_rows, slice_of, whole_weights

_ROWS = 24


def batch_of(job: Job, step: int, case: dict) -> Batch:
    """This rank's share of the rows of one step; `weight` is that of each row's loss."""
    recipe, ranks = job.recipe, job.ranks
    layout, inputs = recipe.layout, recipe.inputs
    rows_of = {name: inputs.table_of(name).rows for name in (*layout.pooled, *layout.sequence)}
    rows = random_rows(layout, rows_of, list(inputs.history_columns), _ROWS, seed=step)
    edges = [0, *[case.get("cut", _ROWS // 2)][: ranks.world_size - 1], _ROWS]
    mine = slice_of(rows, edges[ranks.rank], edges[ranks.rank + 1])
    batch = Batch.from_lists(layout, mine["ids"], dense=mine["dense"], labels=mine["labels"])
    batch.dense = batch.dense.view(len(batch), 1)  # a list of no rows does not say how many columns it has
    batch.weights = torch.full((len(batch),), case.get("weight", ranks.world_size / _ROWS))
    batch.pad_bags(max(high - low for low, high in itertools.pairwise(edges)))
    return batch


def run(case: dict, ranks: Ranks) -> dict:
    """Train one model.

    Returns:
        `before` and `after`, all weights; `vectors` of the first batch, by feature, in evaluation and while training;
        `messages` of the last step; `sums` of the gradients of all steps, by parameter; `unsent` gradients; `sent`,
        how many numbers of all gradients of the last step are not zero.
    """
    job = assemble(recipe_file.parse(case["recipe"], case.get("overrides", [])), ranks, encoder=None)
    optimizer, task = job.optimizer(), job.task
    (embeddings,) = (module for module in task.modules() if isinstance(module, Embeddings))
    found = {"before": whole_weights(job), "vectors": {}, "kinds": {t.name: t.kind for t in job.plan.tables}}
    with torch.no_grad():
        for mode in ("evaluation", "training"):
            task.train(mode == "training")
            batch = batch_of(job, 0, case)
            vectors, events, _ = embeddings(batch.pooled, batch.sequence, batch.weights)
            found["vectors"][mode] = vectors | {name: values for name, (values, _) in events.items()}
    counter, sums, gradients = Collectives(), {}, {}
    batches = [batch_of(job, step, case) for step in range(case.get("steps", 1))]
    task.train()
    if case.get("pipeline"):
        pipeline, rest = TrainPipelineSparseDist(task, optimizer, ranks.device), iter(batches)
        for _ in batches:
            pipeline.progress(rest)
        pipeline.detach()
        batches = []
    for batch in batches:
        counter.messages.clear()
        optimizer.zero_grad()
        with counter:
            counter.phase = "forward"
            loss, _ = task(batch)
            counter.phase = "backward"
            loss.backward()
        gradients = {name: p.grad for name, p in task.named_parameters() if p.grad is not None}
        sums = {name: gradient + sums.get(name, 0) for name, gradient in gradients.items()}
        optimizer.step()
    return found | {
        "after": whole_weights(job),
        "sums": sums,
        "sent": sum(int((gradient != 0).sum()) for gradient in gradients.values()),
        "unsent": dict(job.unsent.residuals) if job.unsent else {},
        "messages": [(m.phase, m.collective, m.dtype, m.num_bytes, m.sent_bytes) for m in counter.messages],
    }


if __name__ == "__main__":
    require_stack()
    content = json.loads(pathlib.Path(sys.argv[1]).read_text())
    with process_group("cpu") as ranks:
        for name, case in content["cases"].items():
            torch.save(run(case, ranks), pathlib.Path(content["output"]) / f"{name}.{ranks.rank}.pt")
