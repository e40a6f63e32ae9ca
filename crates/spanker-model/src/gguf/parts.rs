// SPDX-License-Identifier: Apache-2.0
//! Models in several files, `NAME-00001-of-00003.gguf` and so on: which part a file is, by its header and by its name, and
//! one header for all parts. The metadata are those of the first part. Files are opened elsewhere.

use std::collections::btree_map::Entry;

use super::read::MAX_TENSORS;
use super::{Header, Value};
use crate::ModelError;
use crate::error::printable;

const NUMBER: &str = "split.no";
const COUNT: &str = "split.count";
const TENSORS: &str = "split.tensors.count";
/// The most parts of a model. The largest that are published have a few dozen.
const MAX_PARTS: u64 = 1024;

/// What a file's header says of its place among the parts of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Its number, from 1 as in names; `split.no` counts from 0.
    pub number: u64,
    /// How many parts there are, 2 or more.
    pub count: u64,
    /// Tensors in all parts together.
    pub tensors: u64,
}

/// The name of a file that is a part: `NAME-00002-of-00003.gguf`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartName {
    stem: String,
    number: u64,
    count: u64,
}

impl PartName {
    /// What a file's name, without its folder, says; `None` for a name that is not a part's.
    ///
    /// ```
    /// use spanker_model::gguf::PartName;
    ///
    /// let name = PartName::read("big-00002-of-00003.gguf").expect("a part's name");
    /// assert_eq!((name.number(), name.count()), (2, 3));
    /// assert_eq!(name.of(1), "big-00001-of-00003.gguf");
    /// assert!(PartName::read("big-2-of-3.gguf").is_none());
    /// ```
    #[must_use]
    pub fn read(name: &str) -> Option<PartName> {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            let plain = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
            plain.then(|| text.parse().ok()).flatten()
        };
        Some(PartName { stem: stem.to_owned(), number: digits(number)?, count: digits(count)? })
    }

    /// The number in the name, from 1.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The number of parts in the name.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// The name without what makes it a part's.
    #[must_use]
    pub fn stem(&self) -> &str {
        &self.stem
    }

    /// The name of another part of the same model.
    #[must_use]
    pub fn of(&self, number: u64) -> String {
        format!("{}-{number:05}-of-{:05}.gguf", self.stem, self.count)
    }
}

impl Header {
    /// Which part of a model this file is; `None` for a file that is a whole model.
    ///
    /// # Errors
    ///
    /// A key of the parts that is missing or absurd.
    pub fn part(&self) -> Result<Option<Part>, ModelError> {
        let number = |key: &str, most: u64| match self.metadata.get(key) {
            None => Err(ModelError::metadata(key, "missing")),
            Some(value) => match value.as_u64() {
                Some(number) if number <= most => Ok(number),
                Some(number) => {
                    Err(ModelError::metadata(key, format!("{number} is more than {most}")))
                }
                None => {
                    let reason = printable(&format!("{value:?} is no number from 0 to {most}"));
                    Err(ModelError::metadata(key, reason))
                }
            },
        };
        // Programs that join parts leave a count of 0.
        if !self.metadata.contains_key(COUNT) || number(COUNT, MAX_PARTS)? < 2 {
            return Ok(None);
        }
        let count = number(COUNT, MAX_PARTS)?;
        let tensors = number(TENSORS, MAX_TENSORS)?;
        Ok(Some(Part { number: number(NUMBER, count - 1)? + 1, count, tensors }))
    }
}

/// The header of a model whose parts are being added, in order.
#[derive(Debug)]
pub struct Parts {
    name: PartName,
    part: Part,
    header: Option<Header>,
    added: u64,
}

impl Parts {
    /// The parts of the model of which `header` is one, the file `name`; `None` for a file that is a whole model.
    ///
    /// # Errors
    ///
    /// A header whose keys of the parts are absurd, or that do not go with the name.
    pub fn of(name: &str, header: &Header) -> Result<Option<Parts>, ModelError> {
        let Some(part) = header.part()? else { return Ok(None) };
        let Part { number, count, .. } = part;
        let Some(found) = PartName::read(name) else {
            let wanted = format!("-{number:05}-of-{count:05}.gguf");
            let reason = format!(
                "it is part {number} of {count} ({NUMBER}, {COUNT}): parts are found by their names, which end in '{wanted}'"
            );
            return Err(ModelError::part(name, reason));
        };
        let parts = Parts { name: found, part, header: None, added: 0 };
        parts.check_name(name, part, parts.name.number)?;
        Ok(Some(parts))
    }

    /// How many parts there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.part.count
    }

    /// The names of their files, in order.
    pub fn names(&self) -> impl Iterator<Item = String> {
        (1..=self.part.count).map(|number| self.name.of(number))
    }

    /// Whether a header says what the file's name says.
    fn check_name(&self, name: &str, part: Part, number: u64) -> Result<(), ModelError> {
        let Part { number: found, count, .. } = part;
        if (found, count) != (number, self.name.count) {
            let named = format!("{number} of {}", self.name.count);
            let reason = format!(
                "its header says part {found} of {count} ({NUMBER}, {COUNT}), its name part {named}"
            );
            return Err(ModelError::part(name, reason));
        }
        Ok(())
    }

    /// Adds the next part, the file `name`, whose bytes begin at `start` in the bytes of all parts, one after the other.
    ///
    /// # Errors
    ///
    /// A part that is another one than its name says, or one of another model.
    pub fn add(&mut self, name: &str, header: Header, start: u64) -> Result<(), ModelError> {
        let wrong = |reason: String| Err(ModelError::part(name, reason));
        let number = self.added + 1;
        let Some(part) = header.part()? else {
            return wrong(format!("it has no {COUNT}: it is no part of a model"));
        };
        self.check_name(name, part, number)?;
        if part.tensors != self.part.tensors {
            let (found, first) = (part.tensors, self.part.tensors);
            return wrong(format!("{TENSORS} is {found}, and {first} in another part"));
        }
        self.added = number;
        let Some(all) = &mut self.header else {
            self.header = Some(header);
            return Ok(());
        };
        let kind = "general.architecture";
        if let Some(its) = header.metadata.get(kind)
            && let Some(first) = all.metadata.get(kind).filter(|first| *first != its)
        {
            let text = |value: &Value| printable(value.as_str().unwrap_or("no text"));
            let (its, first) = (text(its), text(first));
            return wrong(format!("{kind} is '{its}', and '{first}' in the first part"));
        }
        // Only where the first part has no tensors can its data begin beyond its end.
        all.data_offset = all.data_offset.min(start);
        let shift = start.saturating_add(header.data_offset).saturating_sub(all.data_offset);
        for (tensor, mut place) in header.tensors {
            place.offset = place.offset.saturating_add(shift);
            match all.tensors.entry(tensor) {
                Entry::Vacant(slot) => slot.insert(place),
                Entry::Occupied(slot) => {
                    let tensor = printable(slot.key());
                    return wrong(format!("tensor '{tensor}' is in another part as well"));
                }
            };
        }
        let (found, said) = (all.tensors.len() as u64, self.part.tensors);
        if found > said {
            return wrong(format!("{TENSORS} is {said}, and with this part there are {found}"));
        }
        Ok(())
    }

    /// The header of all parts.
    ///
    /// # Errors
    ///
    /// Parts that are missing, or that have not the number of tensors that they say they have.
    pub fn finish(self) -> Result<Header, ModelError> {
        let header = self.header.filter(|_| self.added == self.part.count);
        let Some(mut header) = header else {
            let next = self.added + 1;
            return Err(ModelError::part(&self.name.of(next), "it is missing"));
        };
        let (found, said) = (header.tensors.len() as u64, self.part.tensors);
        if found != said {
            let reason = format!("{said}, and the {} parts have {found}", self.part.count);
            return Err(ModelError::metadata(TENSORS, reason));
        }
        // What is joined is a whole model.
        for key in [NUMBER, COUNT, TENSORS] {
            header.metadata.remove(key);
        }
        Ok(header)
    }
}
