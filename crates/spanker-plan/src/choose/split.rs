// SPDX-License-Identifier: Apache-2.0
//! How many layers each stage of a given pipeline gets.

/// What makes one division of layers better than another, from the sum of all stages' times and the longest.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Score {
    /// One pass, one after the other.
    Sum,
    /// So many micro-batches in turn: a turn takes as long as the longest stage.
    Turns(f64),
}

impl Score {
    pub(crate) fn value(self, sum: f64, longest: f64) -> f64 {
        match self {
            Score::Sum => sum,
            Score::Turns(batches) => sum.max(batches * longest),
        }
    }
}

/// One stage as the division sees it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct StageCost {
    /// What each layer takes.
    pub(crate) layer: f64,
    /// What the stage takes besides: hand-off, embedding, head.
    pub(crate) besides: f64,
    /// The most layers that it can hold.
    pub(crate) most: u32,
}

/// The division of `layers` that gives the best score, and of equals the one with the shortest longest
/// stage. Every stage gets at least one layer. `apart` is part of the sum and of no stage.
///
/// For a given longest stage the least sum fills the cheapest stages first. Nothing is found where a bound says that
/// no division scores less than `beat`.
pub(crate) fn divide(
    stages: &[StageCost],
    layers: u32,
    score: Score,
    apart: f64,
    beat: f64,
) -> Option<(f64, Vec<u32>)> {
    let room: u64 = stages.iter().map(|stage| u64::from(stage.most)).sum();
    if room < u64::from(layers) || layers < stages.len() as u32 {
        return None;
    }
    if stages.iter().any(|stage| stage.most == 0) {
        return None;
    }
    let mut cheapest: Vec<usize> = (0..stages.len()).collect();
    cheapest.sort_by(|&a, &b| stages[a].layer.total_cmp(&stages[b].layer).then(a.cmp(&b)));
    let mut counts = vec![0u32; stages.len()];
    // The score, the sum and the longest stage under a limit, if the layers fit under it.
    let mut under = |limit: f64| {
        if !fill(stages, &cheapest, layers, limit, &mut counts) {
            return None;
        }
        let times = stages.iter().zip(&counts).map(|(s, &n)| s.besides + s.layer * f64::from(n));
        let (sum, longest) =
            times.fold((apart, 0.0f64), |(sum, longest), time| (sum + time, longest.max(time)));
        Some((score.value(sum, longest), sum, longest))
    };
    let (_, least, high) = under(f64::MAX)?;
    if least >= beat {
        return None;
    }
    if let Score::Turns(batches) = score
        && beat.is_finite()
        && under(beat / batches).is_none_or(|(_, sum, _)| sum >= beat)
    {
        // A shorter longest stage makes the sum no shorter.
        return None;
    }
    // Even without anything besides and with parts of layers the longest stage takes this long.
    let speed: f64 = stages.iter().map(|stage| 1.0 / stage.layer).sum();
    let low = f64::from(layers) / speed * (1.0 - 1e-9);
    // A higher limit never makes the sum longer nor the longest stage shorter.
    let limit = match score {
        Score::Sum => lowest(low, high, |limit| {
            under(limit).is_some_and(|(_, sum, _)| sum <= least * (1.0 + 1e-12))
        }),
        Score::Turns(batches) => {
            let crossed = lowest(low, high, |limit| {
                under(limit).is_some_and(|(_, sum, longest)| batches * longest.max(limit) >= sum)
            });
            // Where sum and turns cross, the better one is on either side.
            let below = crossed * (1.0 - 1e-9);
            let value = |under: Option<(f64, f64, f64)>| under.map_or(f64::INFINITY, |u| u.0);
            if value(under(below)) < value(under(crossed)) { below } else { crossed }
        }
    };
    let (value, _, _) = under(limit)?;
    Some((value, counts))
}

/// What every division of `layers` scores at least: all but one layer of each stage cost what they do on the cheapest,
/// whatever it can hold. Rounded down.
pub(crate) fn at_least(stages: &[StageCost], layers: u32, score: Score, apart: f64) -> f64 {
    let ones: f64 = stages.iter().map(|stage| stage.besides + stage.layer).sum();
    let cheapest = stages.iter().map(|stage| stage.layer).fold(f64::INFINITY, f64::min);
    let others = layers.saturating_sub(stages.len() as u32);
    let sum = (apart + ones + cheapest * f64::from(others)) * (1.0 - 1e-9);
    score.value(sum, longest_at_least(stages, layers))
}

/// What the longest stage takes at least: if layers could be cut, all stages would take as long. Rounded down.
fn longest_at_least(stages: &[StageCost], layers: u32) -> f64 {
    let sums = stages.iter().fold((f64::from(layers), 0.0), |(layers, speed), stage| {
        (layers + stage.besides / stage.layer, speed + 1.0 / stage.layer)
    });
    sums.0 / sums.1 * (1.0 - 1e-9)
}

/// About the lowest limit from `low` to `high` that is good enough, where `high` is and higher ones stay
/// so.
fn lowest(mut low: f64, mut high: f64, mut enough: impl FnMut(f64) -> bool) -> f64 {
    while high - low > 1e-10 * high {
        let middle = (low + high) / 2.0;
        if enough(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    high
}

/// One layer for every stage, then as many as possible for the cheapest ones, none above `limit`.
fn fill(
    stages: &[StageCost],
    cheapest: &[usize],
    layers: u32,
    limit: f64,
    counts: &mut [u32],
) -> bool {
    let mut left = layers - stages.len() as u32;
    for (stage, count) in stages.iter().zip(counts.iter_mut()) {
        if stage.besides + stage.layer > limit * (1.0 + 1e-12) {
            return false;
        }
        *count = 1;
    }
    for &index in cheapest {
        let stage = &stages[index];
        let within = (limit * (1.0 + 1e-12) - stage.besides) / stage.layer;
        // The conversion rounds towards zero, and what is beyond the largest number becomes that.
        let most = (within as u32).clamp(1, stage.most);
        let more = (most - 1).min(left);
        counts[index] += more;
        left -= more;
    }
    left == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn every_division(stages: usize, layers: u32) -> Vec<Vec<u32>> {
        if stages == 1 {
            return vec![vec![layers]];
        }
        let rest = stages as u32 - 1;
        (1..=layers.saturating_sub(rest))
            .flat_map(|first| {
                every_division(stages - 1, layers - first).into_iter().map(move |mut tail| {
                    tail.insert(0, first);
                    tail
                })
            })
            .collect()
    }

    proptest! {
        #[test]
        fn no_division_of_layers_scores_better(
            costs in prop::collection::vec((0.1f64..5.0, 0.0f64..3.0, 1u32..9), 1..5),
            layers in 1u32..10,
            score in prop::sample::select(vec![Score::Sum, Score::Turns(2.0), Score::Turns(4.0)]),
        ) {
            let stages: Vec<StageCost> = costs
                .iter()
                .map(|&(layer, besides, most)| StageCost { layer, besides, most })
                .collect();
            let value = |counts: &[u32]| {
                let times = stages.iter().zip(counts).map(|(s, &n)| s.besides + s.layer * f64::from(n));
                let times: Vec<f64> = times.collect();
                score.value(1.0 + times.iter().sum::<f64>(), times.iter().copied().fold(0.0, f64::max))
            };
            let legal = every_division(stages.len(), layers)
                .into_iter()
                .filter(|counts| counts.iter().zip(&stages).all(|(&n, s)| n >= 1 && n <= s.most))
                .map(|counts| value(&counts))
                .fold(f64::INFINITY, f64::min);
            match divide(&stages, layers, score, 1.0, f64::INFINITY) {
                None => prop_assert!(legal.is_infinite()),
                Some((best, counts)) => {
                    prop_assert_eq!(counts.iter().sum::<u32>(), layers);
                    prop_assert!((best - value(&counts)).abs() < 1e-9);
                    prop_assert!(best <= legal * (1.0 + 1e-9), "{} against {}", best, legal);
                    prop_assert!(at_least(&stages, layers, score, 1.0) <= best);
                    // A bound never hides what is better than something.
                    prop_assert!(divide(&stages, layers, score, 1.0, best * (1.0 + 1e-9)).is_some());
                }
            }
        }
    }
}
