// SPDX-License-Identifier: Apache-2.0
//! Messages between the processes of a twin: a length, JSON, and descriptors beside it. What they mean is
//! said elsewhere.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most bytes of a message.
pub(crate) const MOST_BYTES: usize = 1 << 20;

/// The most descriptors that the kernel accepts with one message.
pub(crate) const MOST_FDS: usize = 253;

/// What comes before the JSON: its length, little-endian.
const HEAD: usize = 4;

fn malformed(text: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, text)
}

/// Sends one message whole. The descriptors travel with its first byte.
pub(crate) fn send<T: Serialize>(
    mut stream: &UnixStream,
    message: &T,
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut bytes = vec![0; HEAD];
    serde_json::to_writer(&mut bytes, message)?;
    let length = bytes.len() - HEAD;
    if length > MOST_BYTES || fds.len() > MOST_FDS {
        let text =
            format!("a message of {length} bytes and {} descriptors is too large", fds.len());
        return Err(malformed(text));
    }
    bytes[..HEAD].copy_from_slice(&(length as u32).to_le_bytes());
    let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
    let mut beside = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(beside.push(SendAncillaryMessage::ScmRights(fds)), "they fit");
    }
    // A peer that has gone is an error to report, not a signal to die of.
    let flags = SendFlags::NOSIGNAL;
    let sent = loop {
        match rustix::net::sendmsg(stream, &[IoSlice::new(&bytes)], &mut beside, flags) {
            Err(rustix::io::Errno::INTR) => {}
            outcome => break outcome?,
        }
    };
    stream.write_all(&bytes[sent..])
}

/// Receives one message; `None` at the end of the stream. Without a deadline it waits for as long as it
/// takes. The stream must be a blocking one.
///
/// # Errors
/// [`ErrorKind::TimedOut`] if nothing came in time, [`ErrorKind::InvalidData`] for what is no message, and
/// [`ErrorKind::UnexpectedEof`] for one that breaks off. After the last two, and after a message that came
/// late in part, nobody knows where the next one begins.
pub(crate) fn receive<T: DeserializeOwned>(
    stream: &UnixStream,
    deadline: Option<Instant>,
) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut fds = Vec::new();
    let mut head = [0; HEAD];
    if !fill(stream, &mut head, &mut fds, deadline)? {
        return Ok(None);
    }
    let length = u32::from_le_bytes(head) as usize;
    if length > MOST_BYTES {
        return Err(malformed(format!("a message announces {length} bytes")));
    }
    let mut bytes = vec![0; length];
    if length > 0 && !fill(stream, &mut bytes, &mut fds, deadline)? {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let message = serde_json::from_slice(&bytes).map_err(|error| malformed(error.to_string()))?;
    Ok(Some((message, fds)))
}

/// Fills `bytes`; `false` if the stream ends before the first of them.
fn fill(
    stream: &UnixStream,
    bytes: &mut [u8],
    fds: &mut Vec<OwnedFd>,
    deadline: Option<Instant>,
) -> io::Result<bool> {
    let mut filled = 0;
    while filled < bytes.len() {
        let left = deadline.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Err(ErrorKind::TimedOut.into());
        }
        // A timeout of less than a microsecond would stand for none at all.
        stream.set_read_timeout(left.map(|left| left.max(Duration::from_micros(1))))?;
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FDS))];
        let mut beside = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut bytes[filled..])];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let got = match rustix::net::recvmsg(stream, &mut into, &mut beside, flags) {
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::AGAIN) if deadline.is_some() => continue,
            outcome => outcome?,
        };
        for message in beside.drain() {
            if let RecvAncillaryMessage::ScmRights(came) = message {
                fds.extend(came);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MOST_FDS {
            return Err(malformed("a message brings more descriptors than it may".into()));
        }
        match (got.bytes, filled) {
            (0, 0) => return Ok(false),
            (0, _) => return Err(ErrorKind::UnexpectedEof.into()),
            (count, _) => filled += count,
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::fs::File;
    use std::io::{Read, Seek};
    use std::os::fd::AsFd;

    type Words = Vec<String>;

    #[test]
    fn message_arrives_with_its_descriptors_and_the_end_is_told() {
        let (here, there) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"beside").unwrap();
        let words: Words = vec!["some".into(), "words".into()];
        send(&here, &words, &[file.as_fd(), there.as_fd()]).unwrap();
        send(&here, &words, &[]).unwrap();
        drop(here);
        let (came, mut fds) = receive::<Words>(&there, None).unwrap().unwrap();
        assert_eq!((came, fds.len()), (words.clone(), 2));
        let mut copy = File::from(fds.remove(0));
        copy.rewind().unwrap();
        let mut text = String::new();
        copy.read_to_string(&mut text).unwrap();
        assert_eq!(text, "beside");
        let flags = rustix::io::fcntl_getfd(&fds[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        drop(fds);
        let (came, fds) = receive::<Words>(&there, None).unwrap().unwrap();
        assert_eq!((came, fds.len()), (words, 0));
        assert!(receive::<Words>(&there, None).unwrap().is_none());
    }

    #[test]
    fn message_as_large_as_possible_arrives_and_a_larger_one_is_refused() {
        let (here, there) = UnixStream::pair().unwrap();
        let most = vec!["x".repeat(MOST_BYTES - 4)];
        let writer = std::thread::spawn(move || {
            send(&here, &most, &[]).unwrap();
            send(&here, &vec!["x".repeat(MOST_BYTES - 3)], &[]).unwrap_err()
        });
        let (came, _) = receive::<Words>(&there, None).unwrap().unwrap();
        assert_eq!(came[0].len(), MOST_BYTES - 4);
        assert_eq!(writer.join().unwrap().kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn silence_and_dribbling_end_at_the_deadline() {
        let (mut here, there) = UnixStream::pair().unwrap();
        let soon = || Some(Instant::now() + Duration::from_millis(30));
        let error = receive::<Words>(&there, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        here.write_all(&[200, 0, 0, 0, b'[']).unwrap();
        let error = receive::<Words>(&there, soon()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[test]
    fn length_that_is_too_large_is_refused_before_anything_is_read() {
        let (mut here, there) = UnixStream::pair().unwrap();
        here.write_all(&u32::MAX.to_le_bytes()).unwrap();
        let error = receive::<Words>(&there, None).unwrap_err();
        assert_eq!(error.to_string(), "a message announces 4294967295 bytes");
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let (mut here, there) = UnixStream::pair().unwrap();
            here.write_all(&bytes).unwrap();
            drop(here);
            let _ = receive::<crate::orders::Order>(&there, None);
        }
    }
}
