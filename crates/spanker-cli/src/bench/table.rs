// SPDX-License-Identifier: Apache-2.0
//! Rows of collectives as cells of a table: the same columns everywhere, then what the place compares with.

use spanker_bench::{Beside, Row, human};

use crate::output::{Cell, figure};

pub(super) fn cells(row: &Row) -> Vec<Cell> {
    let mut cells = vec![
        Cell::of("size", "(B)", 6, human(row.bytes_per_card)),
        Cell::of("count", "(elements)", 10, row.count),
        Cell::of("type", "", 4, row.dtype),
        Cell::of("op", "", 9, row.op),
        Cell::of("algorithm", "", 18, row.algorithm),
    ];
    let time = match &row.beside {
        Beside::Host { threads, .. } => {
            cells.push(Cell::of("threads", "", 7, threads));
            "time"
        }
        Beside::Cards { clock: "card", .. } => "card time",
        Beside::Cards { .. } => "wall time",
        _ => "time",
    };
    cells.extend([
        Cell::of(time, "(us)", 9, format!("{:.2}", row.time_us)),
        Cell::of("algbw", "(GB/s)", 7, format!("{:.3}", row.algbw_gbps)),
        Cell::of("busbw", "(GB/s)", 7, format!("{:.3}", row.busbw_gbps)),
        Cell::of("#wrong", "", 6, row.wrong),
    ]);
    if let Some(forecast) = row.forecast {
        let error = forecast.error_percent.map_or_else(|| "-".into(), |e| format!("{e:+.2}"));
        cells.extend([
            Cell::of("predicted", "(us)", 9, figure(forecast.predicted_us, 2, "")),
            Cell::of("error", "(%)", 7, error),
        ]);
    }
    match row.beside {
        Beside::Host { limit_fraction, origin_speedup, .. } => cells.extend([
            Cell::of("of limit", "", 8, figure(limit_fraction, 2, "")),
            Cell::of("vs origin", "", 9, figure(origin_speedup, 2, "x")),
        ]),
        Beside::Ranks { vs_mpi, .. } => {
            cells.push(Cell::of("vs MPI", "", 7, figure(vs_mpi, 2, "x")));
        }
        Beside::Logical { moved_gbps, copy_gbps, of_copy, .. } => cells.extend([
            Cell::of("moved", "(GB/s)", 7, format!("{moved_gbps:.1}")),
            Cell::of("copy", "(GB/s)", 7, format!("{copy_gbps:.1}")),
            Cell::of("of copy", "", 8, format!("{of_copy:.3}")),
        ]),
        Beside::Cards { .. } | Beside::Nccl { .. } => {}
    }
    cells
}

#[cfg(feature = "cuda")]
pub(super) fn checked(checked: &spanker_bench::gpu::Checked) -> Vec<Cell> {
    vec![
        Cell::words("type", 5, checked.dtype),
        Cell::words("op", 10, checked.op),
        Cell::of("elements", "", 9, checked.elements),
        Cell::of("#wrong", "", 6, checked.wrong),
    ]
}
