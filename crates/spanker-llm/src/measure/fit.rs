// SPDX-License-Identifier: Apache-2.0
//! From times of operators to what each kind takes: `overhead + units / rate`, for every number of rows that was
//! seen. Pure: where the times come from is not its business.

use std::collections::BTreeMap;
use std::ops::Range;

use spanker_model::Quant;
use spanker_topology::{OperatorKind, OperatorRate, Seconds};

/// Operators that cost the same: one, or a run of products that share their inputs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Class {
    pub(super) kind: OperatorKind,
    pub(super) rows: u64,
    /// Units by type of weights, in the order of the types.
    pub(super) units: Vec<(Option<Quant>, u64)>,
}

/// Times of operators, class by class.
#[derive(Debug, Default)]
pub(super) struct Times {
    classes: BTreeMap<Class, Sum>,
}

/// Seconds of operators of one class, and how many there were.
#[derive(Debug, Default, Clone, Copy)]
struct Sum {
    seconds: f64,
    count: f64,
}

impl Sum {
    fn mean(self) -> f64 {
        self.seconds / self.count.max(1.0)
    }
}

impl Times {
    pub(super) fn add(&mut self, class: &Class, seconds: f64) {
        if !self.classes.contains_key(class) {
            self.classes.insert(class.clone(), Sum::default());
        }
        if let Some(sum) = self.classes.get_mut(class) {
            sum.seconds += seconds;
            sum.count += 1.0;
        }
    }

    /// What each class takes.
    pub(super) fn means(&self) -> BTreeMap<&Class, f64> {
        self.classes.iter().map(|(class, sum)| (class, sum.mean())).collect()
    }

    /// The rates of all kinds and types that were seen, in ascending order of rows.
    pub(super) fn fit(&self) -> Vec<OperatorRate> {
        let mut groups: BTreeMap<(OperatorKind, u64), Vec<(&Class, Sum)>> = BTreeMap::new();
        for (class, sum) in &self.classes {
            groups.entry((class.kind, class.rows)).or_default().push((class, *sum));
        }
        groups.iter().flat_map(|(&(kind, rows), classes)| fit_kind(kind, rows, classes)).collect()
    }

    /// Units of products per second of their time with so many rows, over all types.
    pub(super) fn product_rate(&self, rows: u64) -> f64 {
        let products = self
            .classes
            .iter()
            .filter(|(class, _)| class.kind == OperatorKind::Product && class.rows == rows);
        let (mut units, mut seconds) = (0.0, 0.0);
        for (class, sum) in products {
            let each: u64 = class.units.iter().map(|(_, units)| units).sum();
            units += each as f64 * sum.count;
            seconds += sum.seconds;
        }
        if seconds > 0.0 { units / seconds } else { 0.0 }
    }
}

/// Which of so many values, in ascending order, are usual ones: the quarter around the median.
pub(super) fn middle(count: usize) -> Range<usize> {
    count * 3 / 8..(count * 5 / 8 + 1).min(count)
}

/// The mean of all; 0 where there is none.
pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The mean of the usual ones.
pub(super) fn usual(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    mean(&sorted[middle(sorted.len())])
}

/// Whether programs say how many rows an operator of a kind has. Where they do not, one entry stands for all sizes.
fn by_rows(kind: OperatorKind) -> bool {
    use OperatorKind as Kind;
    !matches!(kind, Kind::Cache | Kind::Gate | Kind::Add | Kind::Copy | Kind::Best)
}

/// The rates of one kind on one number of rows, one for each type of weights.
fn fit_kind(kind: OperatorKind, rows: u64, classes: &[(&Class, Sum)]) -> Vec<OperatorRate> {
    let mut types: Vec<Option<Quant>> = Vec::new();
    for (weights, _) in classes.iter().flat_map(|(class, _)| &class.units) {
        if !types.contains(weights) {
            types.push(*weights);
        }
    }
    let units = |class: &Class, of: Option<Quant>| -> f64 {
        let own = class.units.iter().filter(|(weights, _)| *weights == of);
        own.map(|(_, units)| *units as f64).sum()
    };
    let lines: Vec<Line> = classes
        .iter()
        .map(|(class, sum)| Line {
            columns: types.iter().map(|&of| units(class, of)).collect(),
            seconds: sum.mean(),
            // By plain squares, what was measured and what is predicted have the same sum. One entry for sizes
            // that differ a hundredfold has to be right for the small ones, too.
            weight: match by_rows(kind) {
                true => sum.count,
                false => sum.count / sum.mean().max(1e-9).powi(2),
            },
        })
        .collect();
    let (overhead, per_unit) = least_squares(&lines);
    let entry = |(weights, per_unit): (&Option<Quant>, f64)| OperatorRate {
        kind,
        weights: weights.map(|quant| quant.name().to_owned()),
        rows,
        overhead: Seconds(overhead),
        rate: 1.0 / per_unit,
    };
    types.iter().zip(per_unit).map(entry).collect()
}

/// One equation: a constant and what each column counts for add up to a time.
pub(super) struct Line {
    pub(super) columns: Vec<f64>,
    pub(super) seconds: f64,
    pub(super) weight: f64,
}

/// The least that a unit takes: a rate that no machine has, so that one can be divided by it.
const LEAST: f64 = 1e-18;

/// A constant of zero or more and what a unit of each column takes, which is more than nothing.
pub(super) fn least_squares(lines: &[Line]) -> (f64, Vec<f64>) {
    let columns = lines.first().map_or(0, |line| line.columns.len());
    let good = |found: &Vec<f64>| found.iter().all(|value| value.is_finite() && *value > LEAST);
    if lines.len() > columns
        && let Some(mut found) = solve(lines, true).filter(good)
    {
        return (found.remove(0), found);
    }
    if let Some(found) = solve(lines, false).filter(good) {
        return (0.0, found);
    }
    // Columns that cannot be told apart cost the same.
    let (mut seconds, mut units) = (0.0, 0.0);
    for line in lines {
        seconds += line.weight * line.seconds;
        units += line.weight * line.columns.iter().sum::<f64>();
    }
    let each = if units > 0.0 { seconds / units } else { 0.0 };
    (0.0, vec![each.max(LEAST); columns])
}

/// Solves the normal equations, with a column of ones in front if `constant`.
fn solve(lines: &[Line], constant: bool) -> Option<Vec<f64>> {
    let columns = lines.first()?.columns.len() + usize::from(constant);
    let at = |line: &Line, column: usize| match (constant, column) {
        (true, 0) => 1.0,
        (true, column) => line.columns[column - 1],
        (false, column) => line.columns[column],
    };
    // Columns are scaled to length 1, so that pivots can be compared with 1.
    let length = |column: usize| {
        lines.iter().map(|line| line.weight * at(line, column).powi(2)).sum::<f64>().sqrt()
    };
    let lengths: Vec<f64> = (0..columns).map(length).collect();
    if !lengths.iter().all(|length| *length > 0.0) {
        return None;
    }
    let mut matrix = vec![vec![0.0; columns + 1]; columns];
    for line in lines {
        for (row, sums) in matrix.iter_mut().enumerate() {
            let one = line.weight * at(line, row) / lengths[row];
            for (column, sum) in sums.iter_mut().enumerate() {
                *sum += one
                    * match column < columns {
                        true => at(line, column) / lengths[column],
                        false => line.seconds,
                    };
            }
        }
    }
    for pivot in 0..columns {
        // Not a number is no pivot either.
        if matrix[pivot][pivot].is_nan() || matrix[pivot][pivot] <= 1e-9 {
            return None;
        }
        let own = matrix[pivot].clone();
        for (_, other) in matrix.iter_mut().enumerate().filter(|(row, _)| *row != pivot) {
            let factor = other[pivot] / own[pivot];
            other.iter_mut().zip(&own).for_each(|(value, own)| *value -= factor * own);
        }
    }
    let solved = |row: usize| matrix[row][columns] / matrix[row][row] / lengths[row];
    Some((0..columns).map(solved).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found / expected - 1.0).abs() < 1e-6, "{found} for {expected}");
    }

    #[test]
    fn planted_rates_of_products_come_back_from_runs_of_several_types() {
        // Overhead of 3 us; q4_k at 10 GB/s, q6_k at 6 GB/s. Some runs have both.
        let (q4, q6) = (Some(Quant::Q4K), Some(Quant::Q6K));
        let mut times = Times::default();
        for (count, a, b) in
            [(22, 1_000_000, 0), (22, 3_000_000, 0), (11, 1_000_000, 200_000), (3, 0, 40_000_000)]
        {
            let units: Vec<_> =
                [(q4, a), (q6, b)].into_iter().filter(|(_, units)| *units > 0).collect();
            let class = Class { kind: OperatorKind::Product, rows: 1, units };
            let seconds = 3e-6 + a as f64 / 10e9 + b as f64 / 6e9;
            (0..count).for_each(|_| times.add(&class, seconds));
        }
        let found = times.fit();
        assert_eq!(found.len(), 2, "{found:?}");
        for entry in &found {
            let q4 = entry.weights.as_deref() == Some("q4_k");
            near(entry.rate, if q4 { 10e9 } else { 6e9 });
            near(entry.overhead.0, 3e-6);
            assert_eq!((entry.kind, entry.rows), (OperatorKind::Product, 1));
        }
    }

    #[test]
    fn one_size_alone_has_a_rate_and_no_overhead() {
        let mut times = Times::default();
        let class = Class { kind: OperatorKind::Norm, rows: 8, units: vec![(None, 4096)] };
        (0..5).for_each(|_| times.add(&class, 2e-6));
        let found = times.fit();
        assert_eq!((found.len(), found[0].overhead.0, found[0].rows), (1, 0.0, 8));
        near(found[0].time(4096.0), 2e-6);
    }

    #[test]
    fn kinds_without_rows_have_one_entry_that_is_right_for_small_and_large() {
        let mut times = Times::default();
        for units in [2304u64, 9216, 294_912] {
            let class = Class { kind: OperatorKind::Gate, rows: 1, units: vec![(None, units)] };
            (0..3).for_each(|_| times.add(&class, 5e-7 + units as f64 / 8e9));
        }
        let found = times.fit();
        assert_eq!(found.len(), 1);
        near(found[0].overhead.0, 5e-7);
        near(found[0].rate, 8e9);
    }

    #[test]
    fn larger_operators_that_take_less_still_give_a_rate() {
        let line = |units: f64, seconds: f64| Line { columns: vec![units], seconds, weight: 1.0 };
        let (overhead, each) = least_squares(&[line(1e3, 9e-6), line(1e6, 1e-6)]);
        assert!(overhead == 0.0 && each[0] > 0.0, "{overhead} {each:?}");
        let (overhead, each) = least_squares(&[line(0.0, 0.0)]);
        assert!(overhead == 0.0 && each[0] > 0.0, "{overhead} {each:?}");
    }

    #[test]
    fn sum_of_what_is_predicted_is_the_sum_of_what_was_measured() {
        let line =
            |units: f64, seconds: f64, weight| Line { columns: vec![units], seconds, weight };
        let lines = [line(1e5, 14e-6, 30.0), line(4e5, 45e-6, 30.0), line(3e7, 2.9e-3, 1.0)];
        let (overhead, each) = least_squares(&lines);
        let sum = |of: &dyn Fn(&Line) -> f64| lines.iter().map(|l| l.weight * of(l)).sum::<f64>();
        near(sum(&|line| overhead + line.columns[0] * each[0]), sum(&|line| line.seconds));
    }
}
