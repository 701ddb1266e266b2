"""Random plans and costs, and plans of equal stages, for tests."""

from itertools import combinations, pairwise, product

from rptrain.schedule.costs import LayerCost
from rptrain.schedule.plan import Stage


def random_stages(rng, layers):
    body = layers - rng.randint(1, layers)

    def spans():
        cuts = sorted(rng.sample(range(1, body), rng.randint(0, body - 1))) if body > 1 else []
        return list(pairwise((0, *cuts, body))) if body else []

    forward = [Stage("F", *span) for span in spans()]
    return (*forward, Stage("FB", body, layers), *(Stage("B", *span) for span in reversed(spans())))


def every_stages(layers):
    """Every partition."""

    def spans(body):
        for length in range(max(body, 1)):
            for cuts in combinations(range(1, body), length):
                yield list(pairwise((0, *cuts, body))) if body else []

    for body in range(layers):
        for forward, backward in product(spans(body), repeat=2):
            stages = [Stage("F", *span) for span in forward]
            yield (*stages, Stage("FB", body, layers), *(Stage("B", *span) for span in reversed(backward)))


def random_costs(rng, layers, *, updates=(0,), params=0):
    """Integers, so that their sums are exact. `params` bounds the bytes of a layer; gradients are summed in twice."""
    costs = []
    for _ in range(layers):
        forward, size = rng.randint(1, 9), rng.randint(1, params) if params else 0
        backward, update = 3 * forward + rng.randint(0, 3), rng.choice(updates)
        costs.append(LayerCost(forward, backward, size, size, update=update, sums=2 * size))
    return costs


def equal_stages(forward, ratio):
    """Stages that all take `ratio`: `forward` of so many layers each, the head alone, and backward a layer each."""
    blocks = ratio * forward
    stages = [Stage("F", i, i + ratio) for i in range(0, blocks, ratio)]
    stages += [Stage("FB", blocks, blocks + 1), *(Stage("B", i, i + 1) for i in reversed(range(blocks)))]
    return tuple(stages), [LayerCost(1, ratio)] * blocks + [LayerCost(0, ratio)]
