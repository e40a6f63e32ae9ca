// SPDX-License-Identifier: Apache-2.0
//! What guesses gain: tasks of copying, editing and listing, and free prose, each with guesses and without in turns, beside
//! what was predicted for the same text.

use serde::Serialize;
use spanker_engine::{
    Answer, DraftForecast, DraftModel, DraftSource, Engine, Host, Limits, Model, Options, Sampling,
    Wish,
};
use spanker_plan::{Plan, Request};

use crate::error::{BenchError, Result};
use crate::turns::median;

/// The tasks that are there: a line `=== kind name`, and the prompt up to the next one.
const TASKS: &str = include_str!("drafts/tasks.txt");

/// Something to go on from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// What kind of task it is.
    pub kind: String,
    /// What it is called.
    pub name: String,
    /// The prompt.
    pub prompt: String,
}

impl Task {
    /// Tasks from a text: a line `=== kind name` before each prompt.
    ///
    /// # Errors
    /// [`BenchError::Load`] that names the line.
    pub fn parse(text: &str) -> Result<Vec<Task>> {
        let mut tasks: Vec<Task> = Vec::new();
        for (at, line) in text.lines().enumerate() {
            if let Some(head) = line.strip_prefix("=== ") {
                let (kind, name) = head.split_once(' ').ok_or_else(|| {
                    let number = at + 1;
                    BenchError::Load(format!("line {number}: '{line}' is not '=== kind name'"))
                })?;
                let (kind, name) = (kind.to_owned(), name.to_owned());
                tasks.push(Task { kind, name, prompt: String::new() });
            } else if let Some(task) = tasks.last_mut() {
                task.prompt.push_str(line);
                task.prompt.push('\n');
            } else if !line.trim().is_empty() {
                let what = format!("line {}: no '=== kind name' before it", at + 1);
                return Err(BenchError::Load(what));
            }
        }
        for task in &mut tasks {
            // A model goes on in a line of its own where the prompt ends with an empty one.
            let ended = task.prompt.strip_suffix('\n').unwrap_or_default().len();
            task.prompt.truncate(ended);
        }
        Ok(tasks)
    }

    /// The tasks that are there: 40 of copying, editing and listing, and some prose.
    ///
    /// # Panics
    /// Never: they are read by a test.
    #[must_use]
    pub fn usual() -> Vec<Task> {
        Task::parse(TASKS).expect("tasks that can be read")
    }
}

/// What a task gave. Speeds are tokens per second, medians of the repeats: by the cards' clocks where these show what work
/// costs.
#[derive(Debug, Clone, Serialize)]
pub struct DraftRow {
    version: u32,
    /// What kind of task it is.
    pub kind: String,
    /// What it is called.
    pub name: String,
    /// Tokens of the prompt and after it.
    pub prompt_tokens: usize,
    /// Tokens after the first.
    pub tokens: usize,
    /// By whose clock.
    pub clock: &'static str,
    /// Without guesses.
    pub plain_tokens_per_second: f64,
    /// With guesses.
    pub draft_tokens_per_second: f64,
    /// The second over the first.
    pub gained: f64,
    /// What the same choices over the same text gain by the plan's prices.
    pub predicted_gain: f64,
    /// Guesses.
    pub guessed: u64,
    /// Those that were right.
    pub accepted: u64,
    /// Seconds of all tokens without guesses, and with.
    #[serde(skip)]
    seconds: [f64; 2],
}

/// How tasks are measured.
#[derive(Debug, Clone)]
pub struct DraftWork {
    /// The room for tokens and guesses, and the part of cards' operators that the host computes again.
    pub request: Request,
    /// Tokens of each answer.
    pub generated: usize,
    /// Answers of each kind, in turns.
    pub repeats: u64,
    /// How to split the model.
    pub wish: Wish,
    /// Where guesses come from.
    pub source: DraftSource,
}

/// What guesses gain in all tasks of a kind together.
#[derive(Debug, Clone, PartialEq)]
pub struct KindGain {
    /// The kind.
    pub kind: String,
    /// How many tasks.
    pub tasks: usize,
    seconds: [f64; 2],
}

impl KindGain {
    /// The time without guesses over that with them.
    #[must_use]
    pub fn gained(&self) -> f64 {
        self.seconds[0] / self.seconds[1].max(1e-9)
    }

    fn add(all: &mut Vec<KindGain>, row: &DraftRow) {
        let at = all.iter().position(|known| known.kind == row.kind).unwrap_or(all.len());
        if at == all.len() {
            all.push(KindGain { kind: row.kind.clone(), tasks: 0, seconds: [0.0; 2] });
        }
        all[at].tasks += 1;
        all[at].seconds.iter_mut().zip(row.seconds).for_each(|(sum, time)| *sum += time);
    }
}

/// Runs tasks one after the other, and gives each to `show` when it is done. `small` guesses where a model does. What comes
/// of it is what guesses gain in each kind of task.
///
/// # Errors
/// What planning, loading or running the model fails with; [`BenchError::Wrong`] if tokens with guesses are others; what
/// `show` fails with.
pub fn drafts<E: From<BenchError>>(
    host: &Host,
    model: &Model,
    tasks: &[Task],
    work: &DraftWork,
    small: Option<DraftModel>,
    mut show: impl FnMut(&DraftRow) -> Result<(), E>,
) -> Result<Vec<KindGain>, E> {
    let load = || -> Result<(Plan, Engine<'_>)> {
        let plan = host.plan(model, &work.request, &work.wish)?;
        let options = Options { audit: work.request.audit, ..Options::default() };
        Ok((plan.clone(), Engine::load_with(host, model, plan, options)?))
    };
    let (plan, mut engine) = load()?;
    if let Some(small) = small {
        engine.set_draft_model(small);
    }
    let mut kinds = Vec::new();
    for task in tasks {
        let row = one(&mut engine, model, &plan, task, work)?;
        show(&row)?;
        KindGain::add(&mut kinds, &row);
    }
    Ok(kinds)
}

fn one(
    engine: &mut Engine<'_>,
    model: &Model,
    plan: &Plan,
    task: &Task,
    work: &DraftWork,
) -> Result<DraftRow> {
    let prompt = model.encode(&task.prompt, true, engine.context())?;
    let mut times = [Vec::new(), Vec::new()];
    let mut answers: [Option<Answer>; 2] = [None, None];
    for turn in 0..2 * work.repeats {
        let with = (turn % 2) as usize;
        engine.set_draft(if with == 1 { work.source } else { DraftSource::None });
        // Keys and values of the prompt stay where they are; the same follows from them.
        let known = if turn == 0 { 0 } else { prompt.len() - 1 };
        engine.cut(known);
        let limits = Limits { ignore_end: true, ..Limits::tokens(work.generated) };
        let mut generation = engine.generate(&prompt[known..], Sampling::greedy(), limits)?;
        generation.by_ref().try_for_each(|piece| piece.map(drop))?;
        let (answer, _) = generation.into_answer();
        times[with].push(answer.steps.iter().map(|step| step.time().as_secs_f64()).sum::<f64>());
        if let Some(before) = answers.iter().flatten().next()
            && before.tokens != answer.tokens
        {
            return Err(BenchError::Wrong(format!("{}: other tokens with guesses", task.name)));
        }
        answers[with] = Some(answer);
    }
    let [Some(plain), Some(draft)] = answers else {
        return Err(BenchError::Wrong(format!("{}: no answer", task.name)));
    };
    let [without, with] = times.map(|times| median(&times).unwrap_or(0.0).max(1e-9));
    let tokens = plain.generated();
    let counts = draft.draft.as_ref().map(|draft| draft.counts).unwrap_or_default();
    Ok(DraftRow {
        version: 1,
        kind: task.kind.clone(),
        name: task.name.clone(),
        prompt_tokens: prompt.len(),
        tokens,
        clock: if plain.prompt.card.is_some() { "card" } else { "wall" },
        plain_tokens_per_second: tokens as f64 / without,
        draft_tokens_per_second: tokens as f64 / with,
        gained: without / with,
        predicted_gain: DraftForecast::of_text(plan, &prompt, &plain.tokens).gained,
        guessed: counts.guessed,
        accepted: counts.accepted,
        seconds: [without, with],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_forty_tasks_with_names_of_their_own_and_some_prose() {
        let tasks = Task::usual();
        let prose = tasks.iter().filter(|task| task.kind == "prose").count();
        assert_eq!((tasks.len() - prose, prose), (40, 8));
        let mut names: Vec<&str> = tasks.iter().map(|task| &task.name[..]).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), tasks.len());
        assert!(tasks.iter().all(|task| !task.prompt.trim().is_empty()));
    }

    #[test]
    fn tasks_that_cannot_be_read_are_refused_with_their_line() {
        let error = |text: &str| Task::parse(text).expect_err("no task").to_string();
        assert_eq!(error("=== copy"), "line 1: '=== copy' is not '=== kind name'");
        assert_eq!(error("\nx\n=== a b\n"), "line 2: no '=== kind name' before it");
        let tasks =
            Task::parse("=== copy one\nfirst\nsecond\n\n=== edit two\nthird\n").expect("two");
        assert_eq!((&tasks[0].prompt[..], &tasks[1].prompt[..]), ("first\nsecond\n", "third"));
    }
}
