// SPDX-License-Identifier: Apache-2.0
//! The handle to one card: every request of the ABI as a typed call. It does not look for cards, and it
//! knows nothing of other cards than its own.

use std::fs::OpenOptions;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use bytemuck::{bytes_of_mut, cast_slice_mut};
use nix::errno::Errno;

use crate::abi::{
    ABI_VERSION_MAJOR, AbiVersion, Counters, MESSAGE_MAX_PAYLOAD, Ping, RawAccess, RawAllocate,
    RawCardInfo, RawFault, RawFree, RawPortInfo, RawRead, RawRecord, RawRecords, RawReset,
    RawState, RawSubmit, RawVersion, RawWait, Request,
};
use crate::card::{CardInfo, CardState, CardTime, Fault, PortInfo, Ticket};
use crate::error::{Error, Result};
use crate::feature::Feature;
use crate::transport::{Call, Device, Payload, Socket, Transport};
use crate::work::{BufferId, Descriptor, encode_work};

/// Where the driver puts the control device.
pub const CONTROL_DEVICE_PATH: &str = "/dev/spankerctl";

/// How long a card may take to answer a request, unless the caller says otherwise.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes that one request moves at most. Larger reads and writes are cut, so that every request is answered
/// soon.
const MAX_TRANSFER: usize = 1 << 20;

/// An open card.
///
/// The card is closed when the handle is dropped, and its buffers and work end with that. Requests take
/// `&self`, so threads may share one handle; a request waits for the one before it.
///
/// ```
/// fn shareable<T: Send + Sync>() {}
/// shareable::<spanker_runtime::SpankerControl>();
/// ```
#[derive(Debug)]
pub struct SpankerControl {
    transport: Box<dyn Transport>,
    path: Option<PathBuf>,
    /// Set once the card has shown that it speaks our major version.
    agreed: OnceLock<AbiVersion>,
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

    /// Opens the card at `path`: a character device for reading and writing, or a socket on which a
    /// program plays a card.
    ///
    /// Nothing is asked of the card: a file that is no card opens well and fails at the first
    /// request.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] when the file is absent or may not be opened, or when nobody answers at a socket.
    pub fn open_path<P: AsRef<Path>>(path: P) -> Result<Self> {
        let path = path.as_ref();
        let failed = |source| Error::Open { path: path.to_path_buf(), source };
        let kind = std::fs::metadata(path).map_err(failed)?.file_type();
        let transport: Box<dyn Transport> = if kind.is_socket() {
            Box::new(Socket::new(UnixStream::connect(path).map_err(failed)?))
        } else {
            let file = OpenOptions::new().read(true).write(true).open(path).map_err(failed)?;
            Box::new(Device { file })
        };
        Ok(Self { transport, path: Some(path.to_path_buf()), agreed: OnceLock::new() })
    }

    /// A card that is reached in a way of the caller's own, as simulated ones are.
    #[must_use]
    pub fn over(transport: Box<dyn Transport>) -> Self {
        Self { transport, path: None, agreed: OnceLock::new() }
    }

    /// Where the card was opened.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// Asks the card whether it is alive.
    ///
    /// # Errors
    ///
    /// [`Error::Ioctl`] with `op` equal to `PING`.
    pub fn ping(&self) -> Result<()> {
        self.call(&mut Ping, Payload::Empty, REQUEST_TIMEOUT)
    }

    /// Asks the card which version of the ABI it speaks.
    ///
    /// The answer is not compared with this crate's own version; the calls that need more than the first version do so.
    ///
    /// # Errors
    ///
    /// [`Error::Ioctl`] with `op` equal to `GET_VERSION`.
    pub fn version(&self) -> Result<AbiVersion> {
        let mut answer = RawVersion::default();
        self.call(&mut answer, Payload::Empty, REQUEST_TIMEOUT)?;
        Ok(answer.into())
    }

    /// Whether the card's version of the ABI has a feature. The card is asked for its version once.
    ///
    /// # Errors
    /// [`Error::Version`] if it speaks another major version, else as [`SpankerControl::version`].
    pub fn supports(&self, feature: Feature) -> Result<bool> {
        Ok(self.agree()?.has(feature))
    }

    /// Refuses a card that has not a feature.
    ///
    /// # Errors
    /// [`Error::Unsupported`], else as [`SpankerControl::supports`].
    pub fn require(&self, feature: Feature) -> Result<()> {
        let theirs = self.agree()?;
        if theirs.has(feature) { Ok(()) } else { Err(Error::Unsupported { feature, theirs }) }
    }

    /// What the card is.
    ///
    /// # Errors
    /// [`Error::Version`] if it speaks another major version, [`Error::Unsupported`] if its minor version is too old,
    /// else as every request.
    pub fn info(&self) -> Result<CardInfo> {
        self.ask::<RawCardInfo>().map(CardInfo::from)
    }

    /// What one of its ports is and what it is connected to.
    ///
    /// # Errors
    /// [`Error::Ioctl`] with `EINVAL` if there is no such port.
    pub fn port(&self, port: u32) -> Result<PortInfo> {
        let mut raw = RawPortInfo { port, ..RawPortInfo::default() };
        self.request(&mut raw, Payload::Empty, REQUEST_TIMEOUT)?;
        Ok(raw.into())
    }

    /// A buffer of `length` bytes, filled with 0. It lives until it is freed or the handle is dropped.
    ///
    /// # Errors
    /// [`Error::Ioctl`] with `ENOMEM` if the card has not so much contiguous memory.
    pub fn allocate(&self, length: u64) -> Result<BufferId> {
        let mut raw = RawAllocate { length, buffer: 0 };
        self.request(&mut raw, Payload::Empty, REQUEST_TIMEOUT)?;
        Ok(BufferId(raw.buffer))
    }

    /// Gives a buffer back.
    ///
    /// # Errors
    /// [`Error::Ioctl`] with `EINVAL` for a buffer that is not there, `EBUSY` while work uses it.
    pub fn free(&self, buffer: BufferId) -> Result<()> {
        self.request(&mut RawFree { buffer: buffer.0 }, Payload::Empty, REQUEST_TIMEOUT)
    }

    /// Writes bytes of the host into a buffer.
    ///
    /// # Errors
    /// [`Error::Ioctl`] with `EINVAL` for a place outside the buffer.
    pub fn write(&self, buffer: BufferId, offset: u64, bytes: &[u8]) -> Result<()> {
        for (index, chunk) in bytes.chunks(MAX_TRANSFER).enumerate() {
            let offset = offset.saturating_add((index * MAX_TRANSFER) as u64);
            let mut raw =
                RawAccess { address: 0, length: chunk.len() as u64, buffer: buffer.0, offset };
            self.request(&mut raw, Payload::ToCard(chunk), REQUEST_TIMEOUT)?;
        }
        Ok(())
    }

    /// Reads bytes of a buffer.
    ///
    /// # Errors
    /// As [`SpankerControl::write`].
    pub fn read(&self, buffer: BufferId, offset: u64, bytes: &mut [u8]) -> Result<()> {
        for (index, chunk) in bytes.chunks_mut(MAX_TRANSFER).enumerate() {
            let offset = offset.saturating_add((index * MAX_TRANSFER) as u64);
            let mut raw = RawRead(RawAccess {
                address: 0,
                length: chunk.len() as u64,
                buffer: buffer.0,
                offset,
            });
            self.request(&mut raw, Payload::FromCard(chunk), REQUEST_TIMEOUT)?;
        }
        Ok(())
    }

    /// Gives the card work. All of it is checked before any of it starts.
    ///
    /// # Errors
    /// [`Error::Ioctl`] with `EINVAL` for a descriptor that the card does not accept, `EBUSY` while
    /// another program has work on the card, `EOVERFLOW` if its queue is full, `E2BIG` for more descriptors
    /// than one request takes. [`Error::Unsupported`] for work that came after the card's version.
    pub fn submit(&self, job: u64, work: &[Descriptor]) -> Result<Ticket> {
        let theirs = self.agree()?;
        let needed = work.iter().filter_map(|one| Feature::of_work(&one.work));
        if let Some(feature) = needed.into_iter().find(|&feature| !theirs.has(feature)) {
            return Err(Error::Unsupported { feature, theirs });
        }
        let bytes = encode_work(work);
        if bytes.len() > MESSAGE_MAX_PAYLOAD as usize {
            return Err(Error::Ioctl { op: RawSubmit::NAME, source: Errno::E2BIG });
        }
        let mut raw = RawSubmit { address: 0, length: bytes.len() as u64, job, ticket: 0 };
        self.request(&mut raw, Payload::ToCard(&bytes), REQUEST_TIMEOUT)?;
        Ok(Ticket(raw.ticket))
    }

    /// Waits until work is complete, and says when that was on the card's clock.
    ///
    /// # Errors
    /// [`Error::Incomplete`] after `timeout`, [`Error::Fault`] if the work failed,
    /// [`Error::Unresponsive`] if the card is silent for `timeout` and half as long again.
    pub fn wait(&self, ticket: Ticket, timeout: Duration) -> Result<CardTime> {
        let mut raw = RawWait {
            ticket: ticket.0,
            timeout_ns: u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX),
            completed: 0,
            card_time_ps: 0,
            fault: RawFault::default(),
        };
        let answer_timeout = timeout + timeout / 2 + Duration::from_millis(20);
        self.request(&mut raw, Payload::Empty, answer_timeout)?;
        match raw.fault.fault() {
            Some(fault) => Err(Error::Fault(fault)),
            None if raw.completed < ticket.0 => Err(Error::Incomplete { ticket, waited: timeout }),
            None => Ok(CardTime(raw.card_time_ps)),
        }
    }

    /// Gives up a job on this card: its work fails with `fault`, and its messages are dropped here and at
    /// the neighbours.
    ///
    /// # Errors
    /// As every request.
    pub fn abort(&self, fault: Fault) -> Result<()> {
        let mut raw = RawReset { job: fault.job, fault: fault.into() };
        self.request(&mut raw, Payload::Empty, REQUEST_TIMEOUT)
    }

    /// What the card is doing; `timeout` is how long it may take to say so.
    ///
    /// # Errors
    /// As every request.
    pub fn state(&self, timeout: Duration) -> Result<CardState> {
        let mut raw = RawState::default();
        self.request(&mut raw, Payload::Empty, timeout)?;
        Ok(raw.into())
    }

    /// What the card has done since it was switched on.
    ///
    /// # Errors
    /// As every request.
    pub fn counters(&self) -> Result<Counters> {
        self.ask()
    }

    /// The flight recorder: what happened last on the card, oldest first.
    ///
    /// # Errors
    /// As every request.
    pub fn records(&self) -> Result<Vec<RawRecord>> {
        let mut records = vec![RawRecord::default(); 4096];
        let length = size_of_val(&records[..]) as u64;
        let mut raw = RawRecords { address: 0, length, first: 0, count: 0 };
        self.request(&mut raw, Payload::FromCard(cast_slice_mut(&mut records)), REQUEST_TIMEOUT)?;
        records.truncate(usize::try_from(raw.count).unwrap_or(usize::MAX));
        Ok(records)
    }

    fn ask<R: Request + Default>(&self) -> Result<R> {
        let mut raw = R::default();
        self.request(&mut raw, Payload::Empty, REQUEST_TIMEOUT)?;
        Ok(raw)
    }

    /// The card's version, of our major version.
    fn agree(&self) -> Result<AbiVersion> {
        if let Some(&theirs) = self.agreed.get() {
            return Ok(theirs);
        }
        let theirs = self.version()?;
        if theirs.major != ABI_VERSION_MAJOR {
            return Err(Error::Version { theirs });
        }
        Ok(*self.agreed.get_or_init(|| theirs))
    }

    /// Sends a request that not every card has: the two sides agree on the version first.
    fn request<R: Request>(
        &self,
        raw: &mut R,
        payload: Payload<'_>,
        timeout: Duration,
    ) -> Result<()> {
        let theirs = self.agree()?;
        match R::FEATURE {
            Some(feature) if !theirs.has(feature) => Err(Error::Unsupported { feature, theirs }),
            _ => self.call(raw, payload, timeout),
        }
    }

    fn call<R: Request>(&self, raw: &mut R, payload: Payload<'_>, timeout: Duration) -> Result<()> {
        let (name, number) = (R::NAME, R::NUMBER);
        let argument = bytes_of_mut(raw);
        self.transport.call(&mut Call { name, number, argument, payload, timeout })
    }
}
