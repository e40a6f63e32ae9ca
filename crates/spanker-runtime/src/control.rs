// SPDX-License-Identifier: Apache-2.0
//! The handle to a card's control device, and the crate's only ioctl. It does not retry, wait or
//! look for cards: one call is one request to the driver.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr;

use nix::errno::Errno;
use nix::libc;

use crate::abi::{AbiVersion, Ping, RawVersion, Request};
use crate::error::{Error, Result};

/// Where the driver puts the control device.
pub const CONTROL_DEVICE_PATH: &str = "/dev/spankerctl";

/// An open control device.
///
/// The device is closed when the handle is dropped. Requests take `&self` and carry no state
/// between them, so threads may share one handle.
///
/// ```
/// fn shareable<T: Send + Sync>() {}
/// shareable::<spanker_runtime::SpankerControl>();
/// ```
#[derive(Debug)]
pub struct SpankerControl {
    file: File,
}

impl SpankerControl {
    /// Opens [`CONTROL_DEVICE_PATH`].
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the device is absent or may not be opened.
    pub fn open() -> Result<Self> {
        Self::open_path(CONTROL_DEVICE_PATH)
    }

    /// Opens the control device at `path` for reading and writing.
    ///
    /// Nothing is sent to the driver: a file that is no card opens well and fails at the first
    /// request.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the file is absent or may not be opened.
    pub fn open_path<P: AsRef<Path>>(path: P) -> Result<Self> {
        let path = path.as_ref();
        match OpenOptions::new().read(true).write(true).open(path) {
            Ok(file) => Ok(Self { file }),
            Err(source) => Err(Error::Open { path: path.to_path_buf(), source }),
        }
    }

    /// Asks the driver whether it is alive.
    ///
    /// # Errors
    ///
    /// [`Error::Ioctl`] with `op` equal to `PING`.
    pub fn ping(&self) -> Result<()> {
        self.call(&mut Ping)
    }

    /// Asks the driver which version of the ABI it speaks.
    ///
    /// The answer is not compared with this crate's own version: what to do about a difference is
    /// the caller's decision.
    ///
    /// # Errors
    ///
    /// [`Error::Ioctl`] with `op` equal to `GET_VERSION`.
    pub fn version(&self) -> Result<AbiVersion> {
        let mut answer = RawVersion::default();
        self.call(&mut answer)?;
        Ok(answer.into())
    }

    /// Sends one request, and checks the return code of every request there is.
    fn call<R: Request>(&self, request: &mut R) -> Result<()> {
        // A request without data passes null, so that the driver never sees a stray address.
        let argument = if size_of::<R>() == 0 { ptr::null_mut() } else { ptr::from_mut(request) };
        // SAFETY: `Request` promises that the driver touches no more than `size_of::<R>()` bytes
        // and leaves a valid `R`; the descriptor is open while `self` lives, and the exclusive
        // borrow of `request` outlasts the call.
        let code = unsafe { libc::ioctl(self.file.as_raw_fd(), R::NUMBER, argument) };
        if code < 0 {
            return Err(Error::Ioctl { op: R::NAME, source: Errno::last() });
        }
        Ok(())
    }
}
