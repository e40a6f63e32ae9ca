// SPDX-License-Identifier: Apache-2.0
//! The fabric on emulated devices conforms, and a device that loses what it fetches is found.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use spanker_fabric::{Call, Fabric, Pool, conformance};

use super::super::device::Device;
use super::Emulated;
use crate::CudaFabric;

#[test]
fn the_fabric_on_devices_conforms() {
    conformance::check(|ranks| {
        let device = |_| Box::new(Emulated::new(1).0) as Box<dyn Device>;
        CudaFabric::of((0..ranks).map(device).collect())
    });
}

#[test]
fn a_device_that_does_not_fetch_what_it_was_sent_is_seen() {
    let come = |loses: bool| {
        let device = |rank: usize| {
            let (device, told) = Emulated::new(1);
            told.loses.store(loses && rank == 1, Ordering::Relaxed);
            Box::new(device) as Box<dyn Device>
        };
        conformance::on_all(CudaFabric::of((0..2).map(device).collect()), |mut fabric| {
            let (own, peer) = (fabric.rank() as u8 + 1, 1 - fabric.rank());
            let message = Pool::default().write(5000, |out| out.fill(own));
            let soon = Instant::now() + Duration::from_secs(60);
            let come = fabric.exchange(&Call::BARRIER, &[(peer, message)], &[peer], soon);
            come.expect("a message")[0].bytes().iter().all(|&byte| byte == 3 - own)
        })
    };
    assert_eq!(come(false), [true, true]);
    assert_eq!(come(true), [true, false]);
}
