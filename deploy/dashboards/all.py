"""The five dashboards, in the order in which one looks at them."""

from deploy.dashboards.freshness import FRESHNESS
from deploy.dashboards.pipeline import PIPELINE
from deploy.dashboards.run import RUN
from deploy.dashboards.verifier import VERIFIER
from deploy.dashboards.weight_updates import WEIGHT_UPDATES

BOARDS = (RUN, FRESHNESS, PIPELINE, WEIGHT_UPDATES, VERIFIER)
