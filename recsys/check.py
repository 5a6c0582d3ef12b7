"""Every problem of a recipe and its data at once, without the compiled stack."""

from recsys.errors import UserError
from recsys.recipe_file import load


def check(path: str, overrides: list[str]) -> list[str]:
    """The problems of a recipe, its files and their columns; empty when it can be trained."""
    try:
        recipe = load(path, overrides)
    except UserError as error:
        return [str(error)]
    from recsys.data.parquet import ParquetData
    from recsys.encoder import Encoder

    encoder = Encoder(recipe)
    problems = []
    for split, data_path in recipe.paths.items():
        try:
            data = ParquetData(data_path)
        except UserError as error:
            problems.append(f"data.{split}: {error}")
            continue
        problems += encoder.schema_problems(data.schema, f"data.{split} {data_path}")
    return problems
