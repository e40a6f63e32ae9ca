// SPDX-License-Identifier: Apache-2.0
//! One direction of one link as a line over the bytes of a message. Whole collectives are fitted in `link.rs`.

use spanker_topology::{BytesPerSecond, Seconds};

use super::solve::{dot, least_squares};

/// Latency plus bytes over bandwidth.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// What a message without bytes takes.
    pub latency: Seconds,
    /// What long messages are carried at.
    pub bandwidth: BytesPerSecond,
    /// The largest distance of the line from a sample, as a share of the sample.
    pub worst: f64,
}

impl Line {
    /// The line through samples of bytes and seconds that has the least relative squares. Neither latency
    /// nor time per byte is negative. `None` if the samples do not tell both apart, as when all have the same
    /// size.
    ///
    /// ```
    /// use spanker_plan::Line;
    /// let samples = [(64, 2.128e-6), (4096, 10.192e-6), (1 << 20, 2_099.152e-6)];
    /// let line = Line::fit(&samples).unwrap();
    /// assert_eq!((line.latency.micros().round(), line.bandwidth.0 / 1_000_000), (2.0, 500));
    /// assert!(line.worst < 1e-9);
    /// assert_eq!(Line::fit(&samples[..1]), None);
    /// ```
    #[must_use]
    pub fn fit(samples: &[(u64, f64)]) -> Option<Line> {
        let usable = samples.iter().filter(|(_, seconds)| seconds.is_finite() && *seconds > 0.0);
        let rows: Vec<[f64; 2]> =
            usable.map(|&(bytes, seconds)| [1.0 / seconds, bytes as f64 / seconds]).collect();
        let sizes = |at: usize| samples.get(at).map(|sample| sample.0);
        if rows.len() < 2 || samples.iter().all(|sample| Some(sample.0) == sizes(0)) {
            return None;
        }
        let [latency, per_byte] = least_squares(&rows, &vec![1.0; rows.len()])?;
        let rate = 1.0 / per_byte;
        if !(1.0..1e18).contains(&rate) {
            return None;
        }
        let far = |row: &[f64; 2]| (dot(row, &[latency, per_byte]) - 1.0).abs();
        let worst = rows.iter().map(far).fold(0.0, f64::max);
        Some(Line {
            latency: Seconds(latency),
            bandwidth: BytesPerSecond(rate.round() as u64),
            worst,
        })
    }

    /// What a message takes.
    #[must_use]
    pub fn at(&self, bytes: u64) -> Seconds {
        Seconds(self.latency.0 + bytes as f64 / self.bandwidth.0 as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_messages_weigh_as_much_as_large_ones() {
        // The large message is 1 % late: absolute squares would put all of that on the latency.
        let samples = [(64, 2.1e-6), (256, 2.5e-6), (1024, 4.0e-6), (1 << 22, 8.4e-3 * 1.01)];
        let line = Line::fit(&samples).unwrap();
        assert!((line.latency.micros() - 2.0).abs() < 0.1, "{line:?}");
        assert!((line.at(1 << 22).0 / 8.4e-3 - 1.0).abs() < 0.02, "{line:?}");
        assert!(line.worst < 0.02, "{line:?}");
    }

    #[test]
    fn samples_that_do_not_tell_latency_from_rate_give_nothing() {
        assert_eq!(Line::fit(&[]), None);
        assert_eq!(Line::fit(&[(64, 1e-6), (64, 2e-6)]), None);
        assert_eq!(Line::fit(&[(64, 1e-6), (128, f64::NAN)]), None);
        // Time falls with size: no rate explains that.
        assert_eq!(Line::fit(&[(64, 2e-6), (1 << 20, 1e-6)]), None);
    }
}
