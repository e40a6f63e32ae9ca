// SPDX-License-Identifier: Apache-2.0
//! What NVIDIA's management library knows of a processor and its driver does not say: links, the slot, the power.
//! Without the library these are left out.

use nvml_wrapper::Nvml;
use serde::Serialize;

/// The most links that a processor has.
const MOST_LINKS: u32 = 18;

/// The slot that a processor sits in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Pcie {
    /// The generation at which it runs, which a processor lowers when it has nothing to do.
    pub generation: u32,
    /// Lanes.
    pub width: u32,
    /// The generation that processor and slot can do.
    pub most_generation: u32,
    /// The lanes that they can use.
    pub most_width: u32,
}

impl Pcie {
    /// Bytes in one direction in a second, after the encoding of bits.
    #[must_use]
    pub fn rate(&self) -> u64 {
        // Per lane, in MB/s: 8b/10b up to the second generation, 128b/130b after it.
        let lane: u64 = match self.most_generation {
            0 | 1 => 250,
            2 => 500,
            3 => 985,
            4 => 1_969,
            5 => 3_938,
            _ => 7_563,
        };
        lane * 1_000_000 * u64::from(self.most_width)
    }
}

/// One NVLink of a processor that is up.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NvLink {
    /// Its number on the processor.
    pub link: u32,
    /// The generation of NVLink.
    pub version: u32,
    /// The bus address of what is at the other end: a processor or a switch.
    pub remote: String,
}

impl NvLink {
    /// Bytes in one direction in a second.
    #[must_use]
    pub fn rate(&self) -> u64 {
        match self.version {
            0 | 1 => 20_000_000_000,
            2..=4 => 25_000_000_000,
            _ => 50_000_000_000,
        }
    }
}

/// What the library says of one processor.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Details {
    pub(crate) pcie: Option<Pcie>,
    pub(crate) links: Vec<NvLink>,
    pub(crate) power_watts: Option<f64>,
}

/// The management library, where it is.
#[derive(Debug)]
pub(crate) struct Management(Result<Nvml, String>);

impl Management {
    pub(crate) fn open() -> Management {
        Management(Nvml::init().map_err(|error| error.to_string()))
    }

    /// Why there is nothing to be had from it.
    pub(crate) fn missing(&self) -> Option<&str> {
        self.0.as_ref().err().map(String::as_str)
    }

    /// The release of the driver, as in 580.95.05.
    pub(crate) fn driver(&self) -> Option<String> {
        self.0.as_ref().ok()?.sys_driver_version().ok()
    }

    /// What it knows of the processor at this bus address; nothing where it knows nothing.
    pub(crate) fn details(&self, bus: &str) -> Details {
        let Some(device) =
            self.0.as_ref().ok().and_then(|nvml| nvml.device_by_pci_bus_id(bus).ok())
        else {
            return Details::default();
        };
        let pcie = || {
            Some(Pcie {
                generation: device.current_pcie_link_gen().ok()?,
                width: device.current_pcie_link_width().ok()?,
                most_generation: device.max_pcie_link_gen().ok()?,
                most_width: device.max_pcie_link_width().ok()?,
            })
        };
        let link = |link: u32| {
            let wrapper = device.link_wrapper_for(link);
            wrapper.is_active().ok().filter(|&active| active)?;
            let version = wrapper.version().ok()?;
            let remote = wrapper.remote_pci_info().map_or_else(|_| String::new(), |pci| pci.bus_id);
            Some(NvLink { link, version, remote: short(&remote) })
        };
        Details {
            pcie: pcie(),
            links: (0..MOST_LINKS).filter_map(link).collect(),
            power_watts: device.enforced_power_limit().ok().map(|limit| f64::from(limit) / 1e3),
        }
    }
}

/// A bus address as the driver writes it: four digits for the domain, capital letters.
pub(crate) fn short(bus: &str) -> String {
    let upper = bus.trim().to_uppercase();
    match upper.split_once(':') {
        Some((domain, rest)) if domain.len() > 4 => {
            format!("{}:{rest}", &domain[domain.len() - 4..])
        }
        _ => upper,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bus_addresses_of_both_libraries_become_alike() {
        assert_eq!(short("00000000:19:00.0"), "0000:19:00.0");
        assert_eq!(short("0000:ab:00.0"), "0000:AB:00.0");
        assert_eq!(short(""), "");
    }

    #[test]
    fn rates_of_slots_and_links_follow_their_generation() {
        let slot = Pcie { generation: 1, width: 16, most_generation: 5, most_width: 16 };
        assert_eq!(slot.rate(), 63_008_000_000);
        let link = |version| NvLink { link: 0, version, remote: String::new() }.rate();
        assert_eq!([link(3), link(4), link(5)], [25_000_000_000, 25_000_000_000, 50_000_000_000]);
    }

    #[test]
    fn without_the_library_nothing_is_known_and_it_says_why() {
        let management = Management::open();
        if let Some(why) = management.missing() {
            assert!(!why.is_empty());
            assert_eq!(management.driver(), None);
            assert_eq!(management.details("0000:00:00.0"), Details::default());
        } else {
            assert!(management.driver().is_some());
        }
    }
}
