// SPDX-License-Identifier: Apache-2.0
//! Which terms the samples support, and which other accounts of them are as good.
//!
//! An account is scored by how far it is from the samples, in units of how far measurements of the same
//! thing differ, plus 2 for each of its parameters. So a term has to explain more than noise before it is
//! believed, however few samples there are, and one wild sample cannot buy it.

use super::growth::{Exchange, GIGA, Growth, Terms};
use super::load::Load;
use crate::fit::band::{LEAST_SCALE, robust_scale};
use crate::fit::solve::{distance, robust};

/// The residual beyond which a sample's pull grows no more.
const BEND: f64 = 0.05;
/// With fewer samples there is no majority to be robust with.
const ENOUGH: usize = 4;
/// What a parameter must be worth, as in Akaike's criterion.
const PARAMETER: f64 = 2.0;
/// Accounts whose scores are this near are as good as each other.
const AS_GOOD: f64 = 2.0;
/// The most that one sample counts: three times the noise is wrong, and how wrong does not matter.
const WRONG: f64 = 9.0;
/// By how much an account with exchanges must score better than the one without, and what a term must be worth
/// that takes the place of another.
const SUPPORT: f64 = 2.0;
/// The share of the time that must be memory's on the fewest cards for sharing to have been of use.
const OF_USE: f64 = 0.01;
/// Scores that differ by less are equal but for rounding.
const TIE: f64 = 1e-6;
/// How far a rival's prediction must be from the chosen one to matter, as a logarithm.
const APART: f64 = 0.02;

/// A measured time with what was asked of the cards.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Point {
    pub(super) load: Load,
    pub(super) ms: f64,
}

/// The account that was chosen, the others that are as good, and the distances of the samples from it.
pub(super) struct Choice {
    pub(super) terms: Terms,
    pub(super) rivals: Vec<Terms>,
    /// The relative residuals.
    pub(super) residuals: Vec<(f64, f64)>,
    /// The parameters that the residuals were fitted with.
    pub(super) parameters: usize,
}

/// The columns of a fit that may have a part.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Form {
    memory: bool,
    fixed: bool,
    exchange: Option<Growth>,
}

/// A form with its parameters.
#[derive(Debug, Clone, Copy)]
struct Account {
    terms: Terms,
    parameters: usize,
}

impl Form {
    fn row(self, point: &Point) -> [f64; 3] {
        let Load { bytes, layers, cards } = point.load;
        let column = |used: bool, value: f64| if used { value / point.ms } else { 0.0 };
        let growth = self.exchange.map_or(0.0, |growth| growth.of(cards));
        [
            column(self.memory, bytes / GIGA),
            column(self.fixed, layers),
            column(self.exchange.is_some(), layers * growth),
        ]
    }

    fn fit(self, points: &[Point]) -> Option<Account> {
        let rows: Vec<[f64; 3]> = points.iter().map(|point| self.row(point)).collect();
        let iterations = if points.len() >= ENOUGH { 25 } else { 1 };
        let found = robust(&rows, &vec![1.0; rows.len()], BEND, iterations)?;
        let exchange = self.exchange.filter(|_| found[2] > 0.0);
        let exchange =
            exchange.map(|growth| Exchange { growth, per_layer_ms: found[2], scale: None });
        let parameters = found.iter().filter(|found| **found > 0.0).count();
        let terms = Terms { per_gigabyte_ms: found[0], per_layer_ms: found[1], exchange };
        Some(Account { terms, parameters })
    }
}

impl Account {
    fn residuals(&self, points: &[Point]) -> Vec<(f64, f64)> {
        points.iter().map(|point| (distance(self.terms.ms(point.load) / point.ms), 1.0)).collect()
    }

    /// Whether one card has something to do, and several exchange something.
    fn has_exchange_and_work(&self) -> bool {
        let Terms { per_gigabyte_ms, per_layer_ms, exchange } = self.terms;
        per_gigabyte_ms + per_layer_ms > 0.0 && exchange.is_some()
    }

    /// Whether this is an account of work that is shared and of exchanges that are not.
    fn has_both(&self) -> bool {
        self.terms.per_gigabyte_ms > 0.0 && self.terms.exchange.is_some()
    }
}

/// The scores of all accounts. Noise is how far the samples differ from what the best account says, and at
/// least as far as measurements of the same thing do.
fn scores(accounts: &[Account], points: &[Point]) -> Vec<f64> {
    let residuals: Vec<_> = accounts.iter().map(|account| account.residuals(points)).collect();
    let both = || accounts.iter().zip(&residuals);
    let scale = |(account, residuals): (&Account, &Vec<(f64, f64)>)| {
        robust_scale(residuals, account.parameters, LEAST_SCALE)
    };
    let noise = both().map(scale).fold(f64::INFINITY, f64::min).max(LEAST_SCALE);
    let far = |(residual, _): &(f64, f64)| (residual / noise).powi(2).min(WRONG);
    let score = |(account, residuals): (&Account, &Vec<(f64, f64)>)| {
        residuals.iter().map(far).sum::<f64>() + PARAMETER * account.parameters as f64
    };
    both().map(score).collect()
}

/// Explains times in which exchanges have no part.
pub(super) fn plain(points: &[Point]) -> Option<Choice> {
    let account = Form { memory: true, fixed: true, exchange: None }.fit(points)?;
    Some(Choice {
        terms: account.terms,
        rivals: Vec::new(),
        residuals: account.residuals(points),
        parameters: account.parameters,
    })
}

/// Explains times in which exchanges may have a part.
///
/// Without a reason there is no exchange term. A reason is a score, or that cards with smaller shares were
/// no faster: memory that is read in no time at all explains that worse than exchanges do.
pub(super) fn choose(points: &[Point]) -> Option<Choice> {
    let plain = Form { memory: true, fixed: true, exchange: None }.fit(points)?;
    let many = points.iter().any(|point| point.load.cards != points[0].load.cards);
    let mut others: Vec<Account> = Vec::new();
    for (memory, fixed) in [(true, false), (true, true), (false, true)] {
        let form = |growth| Form { memory, fixed, exchange: Some(growth) };
        let forms = Growth::OF_A_WHOLE.into_iter().filter(|_| many).map(form);
        let fitted = forms.filter_map(|form| form.fit(points));
        others.extend(fitted.filter(|account| account.has_exchange_and_work()));
    }
    let all: Vec<Account> = std::iter::once(plain).chain(others).collect();
    let scores = scores(&all, points);
    let mut best = 0;
    let mut least = match many && sharing_was_of_no_use(&plain, points) {
        true => f64::INFINITY,
        false => scores[0] - SUPPORT,
    };
    for (at, &score) in scores.iter().enumerate().filter(|(at, _)| all[*at].has_both()) {
        if score < least - TIE {
            (best, least) = (at, score);
        }
    }
    let (best, least) = (all[best], scores[best]);
    let slower = best.terms.exchange.is_some();
    // Contention is feared only where more cards were seen to cost something.
    let feared = |terms: &Terms| {
        slower || terms.exchange.is_none_or(|exchange| exchange.growth != Growth::Pairs)
    };
    let rivals = as_good(&all, &scores, least).filter(feared);
    Some(Choice {
        terms: best.terms,
        rivals: apart(rivals, best.terms, points),
        residuals: best.residuals(points),
        parameters: best.parameters,
    })
}

/// Whether cards with smaller shares were no faster, as far as the account without exchanges can tell.
fn sharing_was_of_no_use(plain: &Account, points: &[Point]) -> bool {
    let fewest = points.iter().min_by(|a, b| a.load.cards.total_cmp(&b.load.cards));
    fewest.is_some_and(|point| {
        plain.terms.memory_ms(point.load) < OF_USE * plain.terms.ms(point.load)
    })
}

/// Explains times of exchanges that were measured apart. Nothing comes of times on one card.
pub(super) fn choose_exchange(points: &[Point], work: Terms) -> Option<(Exchange, Vec<Terms>)> {
    let forms =
        Growth::ALL.map(|growth| Form { memory: false, fixed: false, exchange: Some(growth) });
    let fitted = forms.into_iter().filter_map(|form| form.fit(points));
    let accounts: Vec<Account> =
        fitted.filter(|account| account.terms.exchange.is_some()).collect();
    let scores = scores(&accounts, points);
    let mut best = 0;
    for (at, &score) in scores.iter().enumerate() {
        if score < scores[best] - TIE {
            best = at;
        }
    }
    let (best, least) = (*accounts.get(best)?, scores[best]);
    let scale = robust_scale(&best.residuals(points), 1, LEAST_SCALE);
    let with = |terms: Terms| {
        let exchange = terms.exchange.map(|exchange| Exchange { scale: Some(scale), ..exchange });
        Terms { exchange, ..work }
    };
    let chosen = with(best.terms);
    let rivals = as_good(&accounts, &scores, least).map(with);
    Some((chosen.exchange?, apart(rivals, chosen, points)))
}

/// The accounts that are as good as one with this score.
fn as_good(all: &[Account], scores: &[f64], least: f64) -> impl Iterator<Item = Terms> {
    let scored = all.iter().zip(scores);
    scored
        .filter(move |(_, score)| **score < least + AS_GOOD - TIE)
        .map(|(account, _)| account.terms)
}

/// The accounts that predict the least or the most for other numbers of cards, up to four times the largest:
/// the ends of what all of them predict.
fn apart(all: impl Iterator<Item = Terms>, chosen: Terms, points: &[Point]) -> Vec<Terms> {
    let most = points.iter().map(|point| point.load.cards).fold(1.0, f64::max);
    let Some(sampled) = points.iter().map(|point| point.load).find(|load| load.cards == most)
    else {
        return Vec::new();
    };
    let all: Vec<Terms> = all.collect();
    let mut rivals: Vec<Terms> = Vec::new();
    for cards in [1.0, 1.5, 2.0, 4.0, most, most + 1.0, 2.0 * most, 4.0 * most] {
        let load = Load { cards, bytes: sampled.bytes * most / cards, ..sampled };
        let by_time = |a: &&Terms, b: &&Terms| a.ms(load).total_cmp(&b.ms(load));
        let ends = [all.iter().min_by(by_time), all.iter().max_by(by_time)];
        for terms in ends.into_iter().flatten() {
            let differs = distance(terms.ms(load) / chosen.ms(load)) > APART;
            if differs && !rivals.contains(terms) {
                rivals.push(*terms);
            }
        }
    }
    rivals
}
