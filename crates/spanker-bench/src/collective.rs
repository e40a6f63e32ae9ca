// SPDX-License-Identifier: Apache-2.0
//! Which collective is measured, how it may be run, and the loop over its sizes that every target shares.

use std::str::FromStr;
use std::time::Duration;

use spanker_scheduler::{Algorithm, Collective, DType, ReduceOp};

use crate::element::BenchElement;
use crate::error::{BenchError, Result};
use crate::row::{Measured, Row};

/// How long one call of a collective may take, unless something else is wanted.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// What is measured, apart from the size.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    /// The collective.
    pub collective: Collective,
    /// The operation of collectives that reduce.
    pub op: ReduceOp,
    /// The type of the elements.
    pub dtype: DType,
    /// How many cards or ranks take part.
    pub ranks: usize,
    /// How long to spend on each figure.
    pub budget: Duration,
}

/// How a collective is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// In one address space, without messages.
    Fused,
    /// What the fabric has for it by itself.
    Native,
    /// As messages, by the schedule of an algorithm.
    Schedule(Algorithm),
}

impl Method {
    /// Its name, which [`MethodChoice`] parses.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Method::Fused => "fused",
            Method::Native => "native",
            Method::Schedule(algorithm) => algorithm.name(),
        }
    }
}

/// Which method is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MethodChoice {
    /// The best that the target knows.
    Auto,
    /// The best schedule.
    Messages,
    /// This one.
    Given(Method),
}

impl FromStr for MethodChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(MethodChoice::Auto),
            "messages" => Ok(MethodChoice::Messages),
            "fused" => Ok(MethodChoice::Given(Method::Fused)),
            "native" => Ok(MethodChoice::Given(Method::Native)),
            _ => text.parse().map(|method| MethodChoice::Given(Method::Schedule(method))).map_err(|_| {
                let names = Algorithm::ALL.map(Algorithm::name).join(", ");
                format!(
                    "unknown algorithm '{text}' (expected auto, fused, messages, native, {names})"
                )
            }),
        }
    }
}

/// Somewhere collectives run.
pub trait BenchTarget {
    /// Checks the collective once on known inputs, and times it.
    ///
    /// # Errors
    /// What the target fails with.
    fn measure<T: BenchElement>(&mut self, case: &Case, elements: usize) -> Result<Measured>;

    /// What follows from so many wrong elements.
    ///
    /// # Errors
    /// [`BenchError::Wrong`] if there are any.
    fn verdict(&self, wrong: usize) -> Result<()> {
        match wrong {
            0 => Ok(()),
            _ => Err(BenchError::Wrong(format!("{wrong} elements are wrong"))),
        }
    }
}

/// Measures a collective for each size, one row at a time. `begins` is called before each with which one of the sizes it is.
pub fn rows<'a, P: BenchTarget>(
    target: &'a mut P,
    case: &'a Case,
    sizes: &'a [usize],
    mut begins: impl FnMut(usize, usize) + 'a,
) -> impl Iterator<Item = Result<Row>> + 'a {
    sizes.iter().enumerate().map(move |(at, &size)| {
        begins(at, size);
        let elements = size / case.dtype.size();
        let measured = for_type!(case.dtype, T => target.measure::<T>(case, elements));
        Ok(Row::new(case, measured?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::row::Beside;

    /// Takes a microsecond for each element, and gets the last of more than 100 wrong.
    struct Careless;

    impl BenchTarget for Careless {
        fn measure<T: BenchElement>(&mut self, case: &Case, elements: usize) -> Result<Measured> {
            assert_eq!(T::DTYPE, case.dtype);
            Ok(Measured {
                method: Method::Native,
                elements,
                seconds: elements as f64 * 1e-6,
                repeats: 1,
                wrong: usize::from(elements > 100),
                predicted: None,
                beside: Beside::Nccl { gpus: case.ranks, library: String::new() },
            })
        }
    }

    #[test]
    fn every_size_has_a_row_in_its_type_and_wrong_elements_are_an_error() {
        for dtype in DType::ALL {
            let case = Case {
                collective: Collective::AllReduce,
                op: ReduceOp::Sum,
                dtype,
                ranks: 2,
                budget: Duration::ZERO,
            };
            let sizes = [dtype.size(), 200 * dtype.size() + dtype.size() / 2];
            let (mut begun, mut target) = (Vec::new(), Careless);
            let rows: Vec<Row> =
                rows(&mut target, &case, &sizes, |at, size| begun.push((at, size)))
                    .collect::<Result<_>>()
                    .unwrap();
            assert_eq!(rows.iter().map(|row| row.count).collect::<Vec<_>>(), [1, 200]);
            assert_eq!(begun, [(0, sizes[0]), (1, sizes[1])]);
            let wrong = rows.iter().map(|row| row.wrong).sum();
            assert_eq!(target.verdict(wrong).unwrap_err().to_string(), "1 elements are wrong");
            assert!(target.verdict(rows[0].wrong).is_ok());
        }
    }

    #[test]
    fn ways_are_parsed_by_their_names() {
        for method in [Method::Fused, Method::Native, Method::Schedule(Algorithm::Ring)] {
            assert_eq!(method.name().parse(), Ok(MethodChoice::Given(method)));
        }
        assert_eq!(
            ("auto".parse(), "messages".parse()),
            (Ok(MethodChoice::Auto), Ok(MethodChoice::Messages))
        );
        assert!("rign".parse::<MethodChoice>().unwrap_err().contains("'rign'"));
    }
}
