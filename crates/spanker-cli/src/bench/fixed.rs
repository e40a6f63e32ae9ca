// SPDX-License-Identifier: Apache-2.0
//! `spanker bench planner`, `link` and `claims`: benchmarks without a choice, beside what they may take.

use spanker_bench::{
    FRAMES_BAR_GBPS, SIMULATED_PAYLOAD, claims as measure_claims, frames, planner as plans,
    simulated_link, simulation,
};

use crate::output::{self, Cell, Rows};

pub(super) fn planner(as_json: bool) -> anyhow::Result<()> {
    let mut table = Rows::new(as_json);
    table.line(
        "# llama-2-70b as q4_0, 80 layers, on made-up variants of rev-a in a ring; medians of 5",
    )?;
    for row in plans(output::progress)? {
        output::progress_done();
        let row = row?;
        table.add(&row, |row| {
            vec![
                Cell::words("plan", 34, row.plan),
                Cell::of("time", "(ms)", 9, format!("{:.2}", row.seconds * 1e3)),
                Cell::of("may take", "(ms)", 9, row.limit_seconds * 1e3),
                Cell::of("of limit", "", 9, format!("{:.3}", row.seconds / row.limit_seconds)),
            ]
        })?;
    }
    let found = simulation()?;
    if as_json {
        return output::json(&found);
    }
    let (rate, cards) = (found.events_per_second / 1e6, found.virtual_seconds);
    say!(
        "\nsimulate {}: {} events in {:.1} ms, {rate:.1} M events/s ({rate:.1}x of 1 M/s); the cards would take \
         {:.1} ms ({:.2}x)",
        found.simulate,
        found.events,
        found.wall_seconds * 1e3,
        cards * 1e3,
        cards / found.wall_seconds,
    )
}

pub(super) fn link(as_json: bool) -> anyhow::Result<()> {
    let (mut table, bar) = (Rows::new(as_json), FRAMES_BAR_GBPS);
    table.line(
        "# frames of the inter-card link, one core, GB/s of payload; medians that took turns",
    )?;
    for row in frames(|payload| output::progress(&format!("frames of {payload} B"))) {
        output::progress_done();
        let rate = |name, value: f64| Cell::of(name, "", 7, format!("{value:.2}"));
        table.add(&row, |row| {
            vec![
                Cell::of("payload", "", 7, row.payload_bytes),
                rate("both", row.both_gbps),
                rate("encode", row.encode_gbps),
                rate("decode", row.decode_gbps),
                rate("crc32c", row.crc32c_gbps),
                rate("memcpy", row.memcpy_gbps),
                rate("of crc32c", row.both_gbps / row.crc32c_gbps),
                Cell::of("of bar", "", 8, format!("{:.1}x", row.both_gbps / bar)),
            ]
        })?;
    }
    let found = simulated_link()?;
    if as_json {
        return output::json(&found);
    }
    say!(
        "\nbar: {bar} GB/s for both; two simulated ends, every check included: {:.2} M frames/s ({:.2} GB/s)",
        found.frames_per_second / 1e6,
        found.frames_per_second * f64::from(SIMULATED_PAYLOAD) / 1e9
    )
}

pub(super) fn claims(as_json: bool) -> anyhow::Result<()> {
    output::progress("claims ..");
    let costs = measure_claims();
    output::progress_done();
    let costs = costs?;
    if as_json {
        return output::json(&costs);
    }
    output::line("# one claim, in ns; medians that took turns")?;
    let (one, two) = (costs.atomic_addition_ns, costs.atomic_addition_two_threads_ns);
    let mut table = Rows::new(false);
    for (what, cost, of) in [
        ("an atomic addition, one thread", one, one),
        ("a claim, one thread", costs.claim_ns, one),
        ("a claim, its lease and its acceptance", costs.claim_lease_and_acceptance_ns, one),
        ("an atomic addition, two threads", two, two),
        ("a claim, two threads", costs.claim_two_threads_ns, two),
    ] {
        table.cells(&[
            Cell::words("what", 44, what),
            Cell::of("ns", "", 8, format!("{cost:.1}")),
            Cell::of("additions", "", 9, format!("{:.1}x", cost / of)),
        ])?;
    }
    let (bar, part) = (costs.bar_ns, costs.claim_ns / costs.bar_ns);
    say!("\nbar: {bar} ns for a claim alone: {part:.2} of it")
}
