"""What forbids a copy into live weights, on a small tree of modules; tests/integration and tests/gpu copy into real models."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from services.actor.weight_sync.loaders import InPlaceLoader


class Toy(nn.Module):
    """An embedding, a linear layer and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(4, 3), nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight
        self.linear.quant_method = "unquantised"


class ToyLoader(InPlaceLoader):
    """Its shadow takes parameters as they are; `after` is what post-processing does."""

    def __init__(self, live: Toy, after: Callable[[Toy], None] = lambda model: None) -> None:
        self.model, self._after = Toy(), after
        shadows = self.model.modules()
        self.pairs = {name: (module, next(shadows)) for name, module in live.named_modules()}
        self._pristine = {module: dict(module.__dict__) for module in self.model.modules()}
        self._blueprint, self._kernels, self._device = [], [], torch.device("cpu")

    def _materialise(self) -> None:
        self.drop()

    def _finish(self) -> None:
        self._after(self.model)


def packed(model: Toy) -> None:
    handle = model.linear.weight.clone()
    model.linear.apply_packed = lambda x: x @ handle


def transposed(model: Toy) -> None:
    model.linear.weight = nn.Parameter(model.linear.weight.t().contiguous().t())


def smaller(model: Toy) -> None:
    model.linear.weight = nn.Parameter(torch.empty(0))


def added(model: Toy) -> None:
    model.linear.register_parameter("scale", nn.Parameter(torch.ones(1)))


@pytest.mark.parametrize(
    ("after", "says"), [(packed, "derives apply_packed"), (transposed, "layout"), (smaller, "layout"), (added, "scale")]
)
def test_what_post_processing_makes_of_weights_can_forbid_it(after, says) -> None:
    loader = ToyLoader(Toy(), after)
    assert loader.obstacle().startswith("linear: ")
    assert says in loader.obstacle()


def test_a_function_that_holds_no_weights_forbids_nothing_and_a_head_that_only_happens_to_be_tied_does() -> None:
    """The model's own class would make them two: after an update they may differ."""

    def choose_kernel(model: Toy) -> None:
        model.linear.kernel = lambda x, weight: nn.functional.linear(x, weight)

    assert ToyLoader(Toy(), choose_kernel).obstacle() == ""
    live = Toy()
    loader = ToyLoader(live)
    loader.model.head.weight = nn.Parameter(torch.zeros(4, 3))
    assert "tied" in loader.obstacle()
