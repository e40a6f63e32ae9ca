// SPDX-License-Identifier: Apache-2.0
//! What a rank's card did when, as bytes. Whoever reads them believes nothing of it unseen.

use spanker_plan::{Activity, Label, Mark};

/// Bytes of a mark: four numbers of 4 bytes, one of them with the activity, and two times.
pub(super) const BYTES: usize = 40;
/// Marks of a message at most: some megabytes.
pub(super) const MOST: usize = 1 << 16;

/// Marks as bytes.
pub(super) fn write(marks: &[Mark]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(marks.len() * BYTES);
    for mark in marks {
        let Label { activity, layer, token } = mark.label;
        let activity = Activity::ALL.iter().position(|&one| one == activity);
        let activity = activity.expect("every activity is in the list of all") as u32;
        for number in [activity, layer, token, mark.card, mark.op, mark.ops] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(mark.start.to_le_bytes());
        bytes.extend(mark.end.to_le_bytes());
    }
    bytes
}

/// Marks from bytes, or nothing if these are none.
pub(super) fn read(bytes: &[u8]) -> Option<Vec<Mark>> {
    let (marks, odd) = bytes.as_chunks::<BYTES>();
    odd.is_empty().then_some(())?;
    marks.iter().map(read_one).collect()
}

fn read_one(bytes: &[u8; BYTES]) -> Option<Mark> {
    let (numbers, times) = bytes.split_at(24);
    let (numbers, times) = (numbers.as_chunks().0, times.as_chunks().0);
    let number = |at: usize| numbers.get(at).map(|&bytes| u32::from_le_bytes(bytes));
    let time = |at: usize| times.get(at).map(|&bytes| f64::from_le_bytes(bytes));
    let (start, end) = (time(0)?, time(1)?);
    let activity = *Activity::ALL.get(number(0)? as usize)?;
    let label = Label { activity, layer: number(1)?, token: number(2)? };
    let mark =
        Mark { card: number(3)?, label, op: number(4)?, ops: number(5)?, start, end, parts: None };
    (start.is_finite() && end.is_finite() && start <= end).then_some(mark)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn marks() -> impl Strategy<Value = Mark> {
        let number = any::<u32>;
        let times = (-1e6..1e6f64, 0.0..1e3f64);
        (0..Activity::ALL.len(), number(), number(), number(), number(), number(), times).prop_map(
            |(activity, layer, token, card, op, ops, (start, length))| {
                let label = Label { activity: Activity::ALL[activity], layer, token };
                Mark { card, label, op, ops, start, end: start + length, parts: None }
            },
        )
    }

    proptest! {
        #[test]
        fn marks_as_bytes_are_read_as_they_were(marks in prop::collection::vec(marks(), 0..20)) {
            let bytes = write(&marks);
            prop_assert_eq!(bytes.len(), marks.len() * BYTES);
            prop_assert_eq!(read(&bytes), Some(marks));
        }

        #[test]
        fn bytes_that_are_no_marks_are_refused(bytes in prop::collection::vec(any::<u8>(), 1..200)) {
            if let Some(marks) = read(&bytes) {
                prop_assert!(marks.iter().all(|mark| mark.start <= mark.end));
                prop_assert_eq!(write(&marks), bytes);
            }
        }
    }

    #[test]
    fn mark_that_ends_before_it_starts_or_never_is_refused() {
        let label = Label { activity: Activity::Up, layer: 1, token: 2 };
        let mark = Mark { card: 1, label, op: 0, ops: 1, start: 1.0, end: 2.0, parts: None };
        assert_eq!(read(&write(&[mark])), Some(vec![mark]));
        for (start, end) in [(2.0, 1.0), (f64::NAN, 1.0), (0.0, f64::INFINITY)] {
            assert_eq!(read(&write(&[Mark { start, end, ..mark }])), None, "{start} {end}");
        }
        let mut unknown = write(&[mark]);
        unknown[0] = Activity::ALL.len() as u8;
        assert_eq!(read(&unknown), None);
    }
}
