"""Learning-rate schedules: each a function of the step alone, so every layout and every resumed run sees the same rate."""

import math

from shoal.spec.job import TrainSpec


def learning_rate(step: int, train: TrainSpec) -> float:
    """Rate of step `step` (the first is 0): linear warm-up to `train.learning_rate`, then the schedule's own decay.

    cosine and linear fall to min_ratio of the peak at the last step; wsd holds the peak and falls linearly over the
    last `decay_fraction` of the steps; constant only warms up.
    """
    peak, floor = train.learning_rate, train.learning_rate * train.min_ratio
    if step < train.warmup:
        return peak * (step + 1) / train.warmup
    decay_start = train.warmup
    if train.schedule == "wsd":
        decay_start = max(train.warmup, train.steps - math.ceil(train.steps * train.decay_fraction))
    span = max(1, train.steps - 1 - decay_start)
    progress = min(1.0, max(0.0, (step - decay_start) / span))
    if train.schedule == "constant":
        return peak
    if train.schedule == "cosine":
        return floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak + (floor - peak) * progress
