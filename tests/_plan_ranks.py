"""Worker of the plan tests: assemble a recipe's model on real ranks and say what each of them holds.

    torchrun --nproc-per-node N tests/_plan_ranks.py CONFIG.json

CONFIG has `recipe`, and `plans`: the file that each rank pins, or null. Rank r writes `rank_r.json` beside CONFIG.
"""

import json
import pathlib
import sys

from recsys import recipe_file
from recsys.distributed import process_group
from recsys.embedding import table_of_parameter
from recsys.errors import UserError
from recsys.job import assemble
from recsys.stack import require_stack


def run(config: pathlib.Path) -> None:
    """Assemble on this rank and all others; a user's mistake ends with its message and code 2."""
    content = json.loads(config.read_text())
    with process_group("cpu") as ranks:
        pinned = content["plans"][ranks.rank]
        recipe = recipe_file.parse(content["recipe"], [f"train.plan={pinned}"] if pinned else [])
        job = assemble(recipe, ranks, encoder=None)
        held = {}
        for key, value in job.task.state_dict().items():
            if (name := table_of_parameter(key)) and hasattr(value, "local_shards"):
                held[name] = [[*s.metadata.shard_offsets, *s.tensor.shape] for s in value.local_shards()]
        found = {"world_size": ranks.world_size, "held": held, "plan": job.describe_plan(), "log": job.plan.summary()}
        (config.parent / f"rank_{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    require_stack()
    try:
        run(pathlib.Path(sys.argv[1]))
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
