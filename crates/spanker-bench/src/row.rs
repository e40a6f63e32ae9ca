// SPDX-License-Identifier: Apache-2.0
//! One row of results: what every target has in common, and what it is compared with there.

use serde::Serialize;

use crate::collective::{Case, Method};

/// What was measured of one size.
#[derive(Debug)]
pub struct Measured {
    /// How it was run.
    pub method: Method,
    /// Elements of a card's whole buffer.
    pub elements: usize,
    /// Median seconds of one call.
    pub seconds: f64,
    /// How many timings the median is of.
    pub repeats: usize,
    /// Wrong elements over all cards.
    pub wrong: usize,
    /// Seconds by the forecast: nothing where the target has none, `Some(None)` where it has none for these cards.
    pub predicted: Option<Option<f64>>,
    /// What it is compared with.
    pub beside: Beside,
}

/// A line of a table, and the schema of `--json`.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// The collective's name.
    pub collective: &'static str,
    /// The fabric; nothing for host memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fabric: Option<&'static str>,
    /// The type of the elements.
    pub dtype: &'static str,
    /// The operation, or `none`.
    pub op: &'static str,
    /// How it was run.
    pub algorithm: &'static str,
    /// Bytes of a card's whole buffer.
    pub bytes_per_card: usize,
    /// Elements of it.
    pub count: usize,
    /// Median microseconds of one call.
    pub time_us: f64,
    /// Those bytes over that time, in GB/s.
    pub algbw_gbps: f64,
    /// What a card has to send and receive at least over that time, in GB/s.
    pub busbw_gbps: f64,
    /// Wrong elements over all cards.
    pub wrong: usize,
    /// How many timings the median is of.
    pub repeats: usize,
    /// What was predicted, where that is done.
    #[serde(flatten)]
    pub forecast: Option<Forecast>,
    /// What it is compared with.
    #[serde(flatten)]
    pub beside: Beside,
}

/// A prediction beside its row.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Forecast {
    /// Nothing for cards whose speed nobody knows.
    pub predicted_us: Option<f64>,
    /// How far the prediction is from the time, in per cent of the time.
    pub error_percent: Option<f64>,
}

/// Where a row was measured, and what its time is compared with there.
#[derive(Debug, Clone, Serialize)]
#[serde(untagged)]
pub enum Beside {
    /// Buffers in host memory.
    Host {
        /// How many buffers.
        cards: usize,
        /// Threads that shared the work.
        threads: usize,
        /// The time of a read-modify-write stream over the same bytes, as a part of the row's; nothing where nothing
        /// is moved.
        limit_fraction: Option<f64>,
        /// How many times as fast as the original loop; nothing where there was none.
        origin_speedup: Option<f64>,
        /// The stream's time.
        limit_us: f64,
        /// The original loop's time.
        origin_us: Option<f64>,
    },
    /// Cards behind the ABI.
    Cards {
        /// Their indices.
        cards: Vec<usize>,
        /// Whether they are emulated.
        emulated: bool,
        /// What their clocks show.
        pace: &'static str,
        /// Whose clock the time is by: `card` or `wall`.
        clock: &'static str,
    },
    /// Processes that a launcher has started.
    Ranks {
        /// How many.
        ranks: usize,
        /// The time of `MPI_Allreduce` from C in the same run; nothing where there is no such comparison.
        plain_us: Option<f64>,
        /// How many times as fast as that: the median of comparisons that were made one right after the other.
        vs_mpi: Option<f64>,
        /// Between which values that median lies, with a confidence of 95 %.
        vs_mpi_range: Option<[f64; 2]>,
        /// Whether the prediction would have been the same right after the row: if not, the machine has changed.
        steady: bool,
    },
    /// Logical cards that share a GPU.
    Logical {
        /// The GPU.
        gpu: usize,
        /// Its name.
        name: String,
        /// Always true: one GPU emulates the cards.
        logical: bool,
        /// How many cards.
        cards: usize,
        /// Bytes read and written in the time.
        moved_gbps: f64,
        /// What copies moved in the same run, taking turns.
        copy_gbps: f64,
        /// The one as a part of the other.
        of_copy: f64,
    },
    /// GPUs with NCCL.
    Nccl {
        /// How many.
        gpus: usize,
        /// NCCL and its version.
        library: String,
    },
}

impl Beside {
    fn fabric(&self) -> Option<&'static str> {
        match self {
            Beside::Host { .. } => None,
            Beside::Cards { .. } => Some("cards"),
            Beside::Ranks { .. } => Some("mpi"),
            Beside::Logical { .. } | Beside::Nccl { .. } => Some("cuda"),
        }
    }
}

impl Row {
    pub(crate) fn new(case: &Case, measured: Measured) -> Row {
        let Measured { method, elements, seconds, repeats, wrong, predicted, beside } = measured;
        let bytes = elements * case.dtype.size();
        let algbw = bytes as f64 / seconds / 1e9;
        Row {
            collective: case.collective.name(),
            fabric: beside.fabric(),
            dtype: case.dtype.name(),
            op: if case.collective.reduces() { case.op.name() } else { "none" },
            algorithm: method.name(),
            bytes_per_card: bytes,
            count: elements,
            time_us: seconds * 1e6,
            algbw_gbps: algbw,
            busbw_gbps: algbw * case.collective.bus_factor(case.ranks),
            wrong,
            repeats,
            forecast: predicted.map(|predicted| Forecast {
                predicted_us: predicted.map(|time| time * 1e6),
                error_percent: predicted.map(|time| (time / seconds - 1.0) * 100.0),
            }),
            beside,
        }
    }

    /// How many cards or ranks took part.
    #[must_use]
    pub fn ranks(&self) -> usize {
        match &self.beside {
            Beside::Host { cards, .. } | Beside::Logical { cards, .. } => *cards,
            Beside::Cards { cards, .. } => cards.len(),
            Beside::Ranks { ranks, .. } => *ranks,
            Beside::Nccl { gpus, .. } => *gpus,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spanker_scheduler::{Collective, DType, ReduceOp};
    use std::time::Duration;

    fn row(predicted: Option<Option<f64>>, beside: Beside) -> serde_json::Value {
        let case = Case {
            collective: Collective::AllReduce,
            op: ReduceOp::Sum,
            dtype: DType::F32,
            ranks: 2,
            budget: Duration::from_millis(1),
        };
        let method = Method::Native;
        let measured = Measured {
            method,
            elements: 1000,
            seconds: 1e-3,
            repeats: 7,
            wrong: 0,
            predicted,
            beside,
        };
        serde_json::to_value(Row::new(&case, measured)).unwrap()
    }

    #[test]
    fn fields_of_a_fabric_are_there_even_where_there_is_no_value_and_others_are_not() {
        let cards =
            Beside::Cards { cards: vec![0, 3], emulated: true, pace: "card", clock: "card" };
        let blank = row(Some(None), cards.clone());
        assert!(blank["predicted_us"].is_null() && blank.get("predicted_us").is_some(), "{blank}");
        assert!(blank.get("limit_us").is_none() && blank["fabric"] == "cards", "{blank}");
        let known = row(Some(Some(1.1e-3)), cards);
        assert!((known["error_percent"].as_f64().unwrap() - 10.0).abs() < 1e-9, "{known}");
        let host = Beside::Host {
            cards: 2,
            threads: 1,
            limit_fraction: None,
            origin_speedup: None,
            limit_us: 1.0,
            origin_us: None,
        };
        let host = row(None, host);
        assert!(host.get("predicted_us").is_none() && host.get("fabric").is_none(), "{host}");
        assert!(host.get("origin_speedup").is_some_and(serde_json::Value::is_null), "{host}");
        assert_eq!(host["algbw_gbps"], 0.004);
    }
}
