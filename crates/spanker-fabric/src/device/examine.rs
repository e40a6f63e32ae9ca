// SPDX-License-Identifier: Apache-2.0
//! Whether one card, on its own, copies and adds as it should, and whether what two neighbours send each other
//! arrives as it was.

use std::time::Duration;

use spanker_collective::{Algorithm, Collective, DType, Rank, ReduceOp};
use spanker_runtime::{BufferId, Error, Fold, Place, Result, SpankerControl, Work};

use super::error::DeviceError;
use super::group::DeviceGroup;
use super::job_number;
use super::watch::Deadline;

/// Elements of each test buffer: several blocks of every width a card may work in, and a rest.
const ELEMENTS: usize = 4099;
/// How long the test may take.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Writes known numbers into a card's memory, lets it copy and add them, and compares every bit of the
/// result. `false` means that the card cannot be trusted; it takes part in no collective meanwhile.
///
/// # Errors
/// What requests can fail with; [`Error::Fault`] if the card fails the work.
pub fn examine(card: &SpankerControl) -> Result<bool> {
    let bytes = (ELEMENTS * 4) as u64;
    let mut buffers = Vec::new();
    let outcome = (|| {
        for _ in 0..4 {
            buffers.push(card.allocate(bytes)?);
        }
        try_out(card, &buffers)
    })();
    for buffer in buffers {
        // The verdict is known; what is left is freed with the handle.
        let _ = card.free(buffer);
    }
    outcome
}

/// Lets two neighbours send each other known numbers. Returns the ranks in the pair whose message did not arrive
/// as it was; the test cannot tell the sender from the receiver, which [`examine`] and other pairs can.
///
/// # Errors
/// As for any collective of the two.
pub fn examine_pair(
    pair: [&SpankerControl; 2],
    deadline: &Deadline,
) -> std::result::Result<Vec<Rank>, DeviceError> {
    let group = DeviceGroup::new(&pair)?;
    let (gather, op) = (Collective::AllGather, ReduceOp::Sum);
    let mut call = group.prepare(gather, Algorithm::OneShot, 2 * ELEMENTS, DType::F32, op, 1)?;
    let sent = [numbers(0x9e37_79b1), numbers(0x85eb_ca6b)];
    let bytes = sent.each_ref().map(|numbers| bytemuck::cast_slice::<f32, u8>(numbers));
    for (rank, bytes) in bytes.iter().enumerate() {
        call.write_at(rank, (rank * bytes.len()) as u64, bytes)?;
    }
    call.run(deadline)?;
    let mut garbled = Vec::new();
    for (from, to) in [(0, 1), (1, 0)] {
        let mut found = vec![0u8; 2 * bytes[from].len()];
        call.read(to, &mut found)?;
        if found[from * bytes[from].len()..][..bytes[from].len()] != *bytes[from] {
            garbled.push(from);
        }
    }
    Ok(garbled)
}

/// Numbers whose sums are not round, as they are not themselves, so that a flipped bit anywhere shows.
fn numbers(seed: u32) -> Vec<f32> {
    let number = |i: u32| f32::from_bits(0x3f80_0000 | (i.wrapping_mul(seed) & 0x007f_ffff));
    (0..ELEMENTS as u32).map(number).collect()
}

fn try_out(card: &SpankerControl, buffers: &[BufferId]) -> Result<bool> {
    let at = |index: usize| Place { buffer: buffers[index], offset: 0 };
    let (a, b) = (numbers(0x9e37_79b1), numbers(0x85eb_ca6b));
    let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
    card.write(buffers[0], 0, bytemuck::cast_slice(&a))?;
    card.write(buffers[1], 0, bytemuck::cast_slice(&b))?;
    let op = ReduceOp::Sum.code().unwrap_or_default();
    let work = [
        Work::Copy { from: at(0), into: at(2), length: (ELEMENTS * 4) as u64 }.into(),
        Work::Reduce {
            into: at(3),
            sources: vec![at(2), at(1)],
            elements: ELEMENTS as u64,
            fold: Fold { dtype: DType::F32.code(), op },
            divisor: 0,
        }
        .into(),
    ];
    let ticket = card.submit(job_number(), &work)?;
    match card.wait(ticket, TIMEOUT) {
        Ok(_) => {}
        Err(Error::Incomplete { .. }) => return Ok(false),
        Err(error) => return Err(error),
    }
    for (buffer, expected) in [(0, &a), (1, &b), (2, &a), (3, &sums)] {
        let mut found = vec![0u8; ELEMENTS * 4];
        card.read(buffers[buffer], 0, &mut found)?;
        if found != bytemuck::cast_slice::<f32, u8>(expected) {
            return Ok(false);
        }
    }
    Ok(true)
}
