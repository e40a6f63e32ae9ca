// SPDX-License-Identifier: Apache-2.0
//! What happens at the edge, counted; and all of it with what the service says, as Prometheus reads it.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use spanker_engine::{CardState, CardStatus, FinishReason, Status};

/// Upper ends of a histogram's buckets, in seconds.
const BUCKETS: [f64; 17] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0, 300.0,
];

/// How often something took how long.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    counts: [AtomicU64; BUCKETS.len()],
    count: AtomicU64,
    nanoseconds: AtomicU64,
}

impl Histogram {
    /// Once more.
    pub(crate) fn observe(&self, time: Duration) {
        let bucket = BUCKETS.iter().position(|&most| time.as_secs_f64() <= most);
        if let Some(bucket) = bucket {
            self.counts[bucket].fetch_add(1, Ordering::Relaxed);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds.fetch_add(nanoseconds, Ordering::Relaxed);
    }

    fn write(&self, out: &mut String, name: &str, help: &str) {
        head(out, name, "histogram", help);
        let mut sum = 0;
        for (most, count) in BUCKETS.iter().zip(&self.counts) {
            sum += count.load(Ordering::Relaxed);
            line(out, &format!("{name}_bucket{{le=\"{most}\"}}"), sum as f64);
        }
        // A time that was counted and is not in its bucket yet.
        let count = self.count.load(Ordering::Relaxed).max(sum);
        line(out, &format!("{name}_bucket{{le=\"+Inf\"}}"), count as f64);
        let seconds = self.nanoseconds.load(Ordering::Relaxed) as f64 / 1e9;
        line(out, &format!("{name}_sum"), seconds);
        line(out, &format!("{name}_count"), count as f64);
    }
}

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// The model, a stop string or the schema ended the answer.
    Stop,
    /// It has as many tokens as there was room for.
    Length,
    /// The cards could not complete it.
    Failed,
    /// Nobody wanted it any more.
    Cancelled,
    /// Whoever asked did not read.
    Unread,
    /// There was no room.
    Refused,
    /// It made no sense.
    Invalid,
    /// The service did not answer.
    Unavailable,
}

impl Outcome {
    const ALL: [Outcome; 8] = [
        Outcome::Stop,
        Outcome::Length,
        Outcome::Failed,
        Outcome::Cancelled,
        Outcome::Unread,
        Outcome::Refused,
        Outcome::Invalid,
        Outcome::Unavailable,
    ];

    /// Of an answer that is complete.
    pub(crate) fn of(reason: FinishReason) -> Outcome {
        match reason {
            FinishReason::Length | FinishReason::Context => Outcome::Length,
            FinishReason::Stopped => Outcome::Cancelled,
            _ => Outcome::Stop,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Outcome::Stop => "stop",
            Outcome::Length => "length",
            Outcome::Failed => "failed",
            Outcome::Cancelled => "cancelled",
            Outcome::Unread => "unread",
            Outcome::Refused => "refused",
            Outcome::Invalid => "invalid",
            Outcome::Unavailable => "unavailable",
        }
    }
}

/// What is counted here.
#[derive(Debug, Default)]
pub(crate) struct Metrics {
    outcomes: [AtomicU64; Outcome::ALL.len()],
    /// From a request to its first token.
    pub(crate) first_token: Histogram,
    /// From a token to the next.
    pub(crate) between_tokens: Histogram,
    /// From a request to the end of its answer.
    pub(crate) whole: Histogram,
    /// Connections since the start.
    pub(crate) connections: AtomicU64,
    /// Connections that were not taken because there were too many.
    pub(crate) turned_away: AtomicU64,
}

impl Metrics {
    /// A request has ended.
    pub(crate) fn ended(&self, outcome: Outcome) {
        self.outcomes[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// All of it; without a model there is less.
    pub(crate) fn text(&self, status: Option<&Status>, connected: usize) -> String {
        let mut out = String::new();
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed) as f64;
        head(
            &mut out,
            "spanker_requests_total",
            "counter",
            "Answers and refusals, by how they ended.",
        );
        for outcome in Outcome::ALL {
            let name = format!("spanker_requests_total{{outcome=\"{}\"}}", outcome.name());
            line(&mut out, &name, count(&self.outcomes[outcome as usize]));
        }
        let histograms = [
            (
                &self.first_token,
                "spanker_time_to_first_token_seconds",
                "From a request to its first token.",
            ),
            (
                &self.between_tokens,
                "spanker_time_between_tokens_seconds",
                "From a token to the next.",
            ),
            (&self.whole, "spanker_request_seconds", "From a request to the end of its answer."),
        ];
        for (histogram, name, help) in histograms {
            histogram.write(&mut out, name, help);
        }
        for (name, kind, help, value) in [
            ("spanker_connections_total", "counter", "Connections.", count(&self.connections)),
            (
                "spanker_connections_refused_total",
                "counter",
                "Connections that were not taken because there were too many.",
                count(&self.turned_away),
            ),
            ("spanker_connections", "gauge", "Connections that are open.", connected as f64),
        ] {
            head(&mut out, name, kind, help);
            line(&mut out, name, value);
        }
        if let Some(status) = status {
            for (name, kind, help, value) in OF_SERVICE {
                head(&mut out, name, kind, help);
                line(&mut out, name, value(status));
            }
            for (name, kind, help, value) in OF_CARD {
                head(&mut out, name, kind, help);
                for card in &status.cards {
                    let (number, profile) = (card.number, escaped(&card.profile));
                    let labels = format!("{{card=\"{number}\",profile=\"{profile}\"}}");
                    line(&mut out, &format!("{name}{labels}"), value(card));
                }
            }
        }
        out
    }
}

/// What the service says of itself: name, kind, help and value.
const OF_SERVICE: [Row<Status>; 21] = [
    ("spanker_requests_running", "gauge", "Requests that are answered now.", |status| {
        status.running as f64
    }),
    ("spanker_requests_waiting", "gauge", "Requests that wait for their turn.", |status| {
        status.waiting as f64
    }),
    ("spanker_prompt_tokens_total", "counter", "Tokens of prompts that were computed.", |status| {
        status.prompt_tokens as f64
    }),
    (
        "spanker_cached_tokens_total",
        "counter",
        "Tokens of prompts that need not be computed.",
        |status| status.cached_tokens as f64,
    ),
    ("spanker_generated_tokens_total", "counter", "Tokens that were generated.", |status| {
        status.tokens as f64
    }),
    (
        "spanker_recomputed_requests_total",
        "counter",
        "Requests whose tokens were computed again.",
        |status| status.recomputed as f64,
    ),
    ("spanker_steps_total", "counter", "Steps.", |status| status.steps as f64),
    ("spanker_step_seconds_total", "counter", "Seconds that steps took.", |status| {
        status.step_seconds.0
    }),
    (
        "spanker_step_predicted_seconds_total",
        "counter",
        "Seconds that steps were predicted to take.",
        |status| status.step_seconds.1,
    ),
    (
        "spanker_draft_steps_total",
        "counter",
        "Times that guesses of a request were checked.",
        |status| status.draft.steps as f64,
    ),
    ("spanker_draft_guessed_tokens_total", "counter", "Tokens that were guessed.", |status| {
        status.draft.guessed as f64
    }),
    (
        "spanker_draft_accepted_tokens_total",
        "counter",
        "Guesses that were right: as many tokens took no step of their own.",
        |status| status.draft.accepted as f64,
    ),
    ("spanker_draft_refused_tokens_total", "counter", "Guesses that were not.", |status| {
        status.draft.refused() as f64
    }),
    ("spanker_tokens_per_second", "gauge", "Tokens in a second, lately.", |status| status.rate.0),
    ("spanker_tokens_per_second_predicted", "gauge", "The same, predicted.", |status| {
        status.rate.1
    }),
    ("spanker_kv_blocks", "gauge", "Blocks of keys and values.", |status| status.kv.total as f64),
    ("spanker_kv_blocks_used", "gauge", "Blocks of answers that are under way.", |status| {
        status.kv.used as f64
    }),
    (
        "spanker_kv_blocks_cached",
        "gauge",
        "Blocks of none, whose content may be used again.",
        |status| status.kv.cached as f64,
    ),
    ("spanker_kv_block_tokens", "gauge", "Tokens that a block has room for.", |status| {
        status.kv.tokens as f64
    }),
    ("spanker_cards_lost_total", "counter", "Cards that were lost.", |status| {
        status.cards_lost as f64
    }),
    ("spanker_cards_back_total", "counter", "Cards that came back.", |status| {
        status.cards_back as f64
    }),
];

/// What it says of each card.
const OF_CARD: [Row<CardStatus>; 5] = [
    (
        "spanker_card_busy_ratio",
        "gauge",
        "The part of its time that a card computed, lately.",
        |card| card.busy,
    ),
    (
        "spanker_card_waiting_ratio",
        "gauge",
        "The part of its time that a card waited for others, lately.",
        |card| card.waiting,
    ),
    ("spanker_card_lost", "gauge", "Whether a card was lost.", |card| {
        f64::from(card.state == CardState::Lost)
    }),
    ("spanker_card_bytes", "gauge", "Bytes that a card holds.", |card| {
        card.bytes.iter().sum::<u64>() as f64
    }),
    ("spanker_card_capacity_bytes", "gauge", "Bytes that a card has.", |card| card.capacity as f64),
];

/// Name, kind, help, and how the value is found.
type Row<T> = (&'static str, &'static str, &'static str, fn(&T) -> f64);

/// A label's value.
fn escaped(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    // Texts can be written to without an end.
    let _ = write!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

fn line(out: &mut String, name: &str, value: f64) {
    let _ = writeln!(out, "{name} {value}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_in_every_bucket_that_they_fit() {
        let histogram = Histogram::default();
        for milliseconds in [1, 3, 3, 200, 1_000_000] {
            histogram.observe(Duration::from_millis(milliseconds));
        }
        let mut out = String::new();
        histogram.write(&mut out, "x", "y");
        for expected in [
            "# TYPE x histogram\n",
            "x_bucket{le=\"0.001\"} 1\n",
            "x_bucket{le=\"0.0025\"} 1\n",
            "x_bucket{le=\"0.005\"} 3\n",
            "x_bucket{le=\"0.1\"} 3\n",
            "x_bucket{le=\"0.25\"} 4\n",
            "x_bucket{le=\"300\"} 4\n",
            "x_bucket{le=\"+Inf\"} 5\n",
            "x_sum 1000.207\n",
            "x_count 5\n",
        ] {
            assert!(out.contains(expected), "{expected}: {out}");
        }
    }

    #[test]
    fn outcomes_are_where_they_are_counted() {
        for (at, outcome) in Outcome::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, at);
        }
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
