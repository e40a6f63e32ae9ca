// SPDX-License-Identifier: Apache-2.0
//! Least squares with parameters of zero or more, plain and robust, for a handful of columns.
//!
//! Rows are relative: each was divided by its measured time, so that the right-hand side is 1
//! everywhere and a residual is a share of the time.

/// Pivots below this, of columns that were scaled to length 1, mean that columns depend on each other.
const SINGULAR: f64 = 1e-11;
/// A coefficient this far below zero, of columns scaled to length 1, is zero but for rounding.
const ROUNDING: f64 = 1e-9;
/// Sums of squares that differ by less than this share are equal.
const TIE: f64 = 1e-12;

/// The sums that least squares needs.
struct Sums<const P: usize> {
    /// Products of columns, scaled to a diagonal of 1.
    products: [[f64; P]; P],
    /// Products of columns with the right-hand side, scaled.
    sides: [f64; P],
    /// The lengths of the columns.
    lengths: [f64; P],
    /// The sum of the weights: the square of the right-hand side's length.
    total: f64,
}

impl<const P: usize> Sums<P> {
    fn of(rows: &[[f64; P]], weights: &[f64]) -> Sums<P> {
        let (mut products, mut sides, mut total) = ([[0.0; P]; P], [0.0; P], 0.0);
        for (row, &weight) in rows.iter().zip(weights) {
            for i in 0..P {
                sides[i] += weight * row[i];
                for j in 0..P {
                    products[i][j] += weight * row[i] * row[j];
                }
            }
            total += weight;
        }
        let lengths: [f64; P] = std::array::from_fn(|i| products[i][i].sqrt());
        for i in 0..P {
            sides[i] /= lengths[i];
            for j in 0..P {
                products[i][j] /= lengths[i] * lengths[j];
            }
        }
        Sums { products, sides, lengths, total }
    }

    /// The coefficients of the columns in `subset`, or nothing where those depend on each other or a
    /// coefficient is negative.
    fn solve(&self, subset: usize) -> Option<[f64; P]> {
        let inside: Vec<usize> = (0..P).filter(|i| subset >> i & 1 == 1).collect();
        let (mut matrix, mut side) = (self.products, self.sides);
        // Elimination without pivoting is stable here: the matrix is symmetric and not negative.
        for (at, &pivot) in inside.iter().enumerate() {
            let divisor = matrix[pivot][pivot];
            // Not a number fails this test, too.
            if !(divisor > SINGULAR && self.lengths[pivot] > 0.0) {
                return None;
            }
            for &row in &inside[at + 1..] {
                let factor = matrix[row][pivot] / divisor;
                for &column in &inside[at..] {
                    matrix[row][column] -= factor * matrix[pivot][column];
                }
                side[row] -= factor * side[pivot];
            }
        }
        let mut found = [0.0; P];
        for (at, &row) in inside.iter().enumerate().rev() {
            let later: f64 = inside[at + 1..].iter().map(|&c| matrix[row][c] * found[c]).sum();
            found[row] = (side[row] - later) / matrix[row][row];
        }
        let rounding = ROUNDING * self.total.sqrt();
        for &i in &inside {
            if found[i].is_nan() || found[i] < -rounding {
                return None;
            }
            found[i] = found[i].max(0.0) / self.lengths[i];
        }
        Some(found)
    }
}

/// The coefficients, none negative, with the least weighted sum of squares.
///
/// Every subset of columns is tried, larger ones first, and only a truly smaller sum replaces what
/// was found before. So where columns depend on each other (all samples have one size, for example)
/// the first of the largest independent subsets wins, always the same one.
pub(super) fn least_squares<const P: usize>(
    rows: &[[f64; P]],
    weights: &[f64],
) -> Option<[f64; P]> {
    let sums = Sums::of(rows, weights);
    let mut subsets: Vec<usize> = (1..1 << P).collect();
    subsets.sort_by_key(|set| (std::cmp::Reverse(set.count_ones()), *set));
    let mut best: Option<(f64, [f64; P])> = None;
    for subset in subsets {
        let Some(found) = sums.solve(subset) else { continue };
        let square = |(row, weight): (&[f64; P], &f64)| weight * (dot(row, &found) - 1.0).powi(2);
        let error: f64 = rows.iter().zip(weights).map(square).sum();
        if best.is_none_or(|(least, _)| error < least - TIE * sums.total) {
            best = Some((error, found));
        }
    }
    best.map(|(_, found)| found)
}

/// The product of a row and the coefficients: predicted over measured.
pub(super) fn dot<const P: usize>(row: &[f64; P], coefficients: &[f64; P]) -> f64 {
    row.iter().zip(coefficients).map(|(x, c)| x * c).sum()
}

/// The distance of predicted from measured as a logarithm: the same for twice and for half.
pub(super) fn distance(predicted_over_measured: f64) -> f64 {
    predicted_over_measured.max(1e-3).ln().abs()
}

/// [`least_squares`] repeated with Huber's weights: beyond `bend`, a residual's pull grows no more.
pub(super) fn robust<const P: usize>(
    rows: &[[f64; P]],
    weights: &[f64],
    bend: f64,
    iterations: usize,
) -> Option<[f64; P]> {
    let mut bent = weights.to_vec();
    let mut found = None;
    for _ in 0..iterations {
        let coefficients = least_squares(rows, &bent)?;
        for ((bent, &weight), row) in bent.iter_mut().zip(weights).zip(rows) {
            let residual = distance(dot(row, &coefficients));
            *bent = if residual > bend { weight * bend / residual } else { weight };
        }
        found = Some(coefficients);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_rows_give_back_their_coefficients() {
        let truth = [3.0, 0.5, 2.0];
        let raw = [[1.0, 1.0, 0.1], [1.0, 3.0, 0.4], [1.0, 1.0, 2.0], [1.0, 7.0, 1.0]];
        let rows = raw.map(|row| row.map(|x| x / dot(&row, &truth)));
        let found = least_squares(&rows, &[1.0, 0.5, 0.25, 1.0]).expect("independent");
        for (found, truth) in found.iter().zip(truth) {
            assert!((found - truth).abs() < 1e-9, "{found} {truth}");
        }
    }

    #[test]
    fn dependent_columns_leave_the_first_largest_subset() {
        // The second column is three times the first.
        let rows = [[1.0, 3.0, 0.5], [0.5, 1.5, 0.75]];
        let found = least_squares(&rows, &[1.0, 1.0]).expect("the others are independent");
        assert!(found[0] > 0.0 && found[1] == 0.0 && found[2] > 0.0, "{found:?}");
        // All columns depend on each other.
        let found = least_squares(&[[2.0, 6.0, 1.0]; 3], &[1.0; 3]).expect("one column does");
        assert!((found[0] - 0.5).abs() < 1e-12 && found[1..] == [0.0, 0.0], "{found:?}");
    }

    #[test]
    fn a_coefficient_that_would_be_negative_is_zero() {
        // 1 at x = 1 and 1 at x = 2 after division by times that fall with x.
        let rows = [[1.0 / 4.0, 1.0 / 4.0], [1.0 / 2.0, 2.0 / 2.0]];
        let found = least_squares(&rows, &[1.0, 1.0]).expect("one column does");
        assert!(found[0] > 0.0 && found[1] == 0.0, "{found:?}");
    }

    #[test]
    fn nothing_comes_of_rows_without_weight() {
        assert_eq!(robust::<2>(&[[1.0, 1.0]], &[0.0], 0.05, 3), None);
    }
}
