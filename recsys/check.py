"""Every problem of a recipe and its data at once, without the compiled stack."""

from recsys.errors import UserError
from recsys.recipe_file import load


def check(path: str, overrides: list[str]) -> list[str]:
    """The problems of a recipe, its files and their columns; empty when it can be trained."""
    try:
        recipe = load(path, overrides)
        paths = recipe.paths
    except UserError as error:
        return [str(error)]
    from recsys.data.parquet import ParquetData
    from recsys.encoder import Encoder
    from recsys.vectors import file_problems

    try:
        encoder = Encoder(recipe)
    except UserError as error:  # Text features need an extra that is not installed.
        return [f"features: {error}"]
    problems, schemas = [], {}
    for split, data_path in paths.items():
        try:
            data = ParquetData(data_path)
        except UserError as error:
            problems.append(f"data.{split}: {error}")
            continue
        problems += encoder.schema_problems(data.schema, f"data.{split} {data_path}")
        schemas[f"data.{split}"] = data.schema
        if not data.num_rows:
            problems.append(f"data.{split} {data_path} has no rows. Do: name data that has some, or prepare it again")
    return [*problems, *encoder.kind_problems(schemas), *file_problems(recipe)]
