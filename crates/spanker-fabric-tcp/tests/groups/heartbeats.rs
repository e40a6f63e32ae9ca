// SPDX-License-Identifier: Apache-2.0
//! Who is taken for dead: not a rank that computes for long and reads nothing meanwhile.

use std::time::Duration;

use spanker_fabric::conformance::on_all;
use spanker_fabric::{Call, Fabric, Message, Pool};
use spanker_fabric_tcp::Options;

use crate::support::{group_with, options, soon};

/// Bytes of a message. Two are more than an end keeps for its rank, three more than the kernel does besides.
const LONG: usize = 40 << 20;
const MESSAGES: usize = 3;

#[test]
fn a_rank_that_computes_for_longer_than_the_timeout_and_reads_nothing_is_not_dropped() {
    let timeout = Duration::from_secs(2);
    let outcomes = on_all(group_with(2, &Options { timeout, ..options() }), |mut fabric| {
        if fabric.rank() == 0 {
            let message: Message = Pool::default().write(LONG, |out| out.fill(7));
            for _ in 0..MESSAGES {
                fabric.exchange(&Call::BARRIER, &[(1, message.clone())], &[], soon())?;
            }
            return fabric.barrier(soon());
        }
        // No call: what is sent to it fills what the kernel keeps, and stays there.
        std::thread::sleep(timeout * 2);
        for _ in 0..MESSAGES {
            let came = fabric.exchange(&Call::BARRIER, &[], &[0], soon())?;
            assert!(came[0].bytes().len() == LONG && came[0].bytes().iter().all(|&byte| byte == 7));
        }
        fabric.barrier(soon())
    });
    assert_eq!(outcomes, [Ok(()), Ok(())]);
}

#[test]
fn ranks_that_all_compute_for_longer_than_the_timeout_find_each_other_again() {
    let timeout = Duration::from_secs(1);
    let outcomes = on_all(group_with(3, &Options { timeout, ..options() }), |mut fabric| {
        fabric.barrier(soon())?;
        std::thread::sleep(timeout * 2);
        fabric.barrier(soon())
    });
    assert_eq!(outcomes, [Ok(()), Ok(()), Ok(())]);
}
