"""Recipes: their fields, loading and checks, before anything starts."""

from pipelinerl.recipe.fields import RULES
from pipelinerl.recipe.rules import check_rules

RULES.append(check_rules)
