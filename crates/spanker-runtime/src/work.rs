// SPDX-License-Identifier: Apache-2.0
//! Work for a card, as values and as the bytes of descriptors. Whether a place lies inside a buffer is
//! the card's to know; everything that can be told from the bytes alone is checked here.

use bytemuck::{Pod, bytes_of, pod_read_unaligned};

use crate::abi::{
    RECEIVE_FOLD_FIRST, RECEIVE_FOLD_SECOND, RECEIVE_STORE, RawCopy, RawFence, RawFill, RawMatmul,
    RawPlace, RawReceive, RawReduce, RawSend, RawWork, WORK_COPY, WORK_FENCE, WORK_FILL,
    WORK_MATMUL, WORK_RECEIVE, WORK_REDUCE, WORK_SEND, WORK_VERSION,
};

/// A buffer in a card's memory. Handles are numbers that the card gives out once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BufferId(pub u64);

/// A byte of a buffer, from which something begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The buffer.
    pub buffer: BufferId,
    /// Bytes from its start.
    pub offset: u64,
}

/// An element type and an operation, in the ABI's numbers (`TYPE_*` and `OP_*` of [`crate::abi`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fold {
    /// The type.
    pub dtype: u16,
    /// The operation.
    pub op: u16,
}

/// What a receive does with what comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Landing {
    /// Stores it.
    Store,
    /// `local = incoming op local`.
    FoldFirst(Fold),
    /// `local = local op incoming`.
    FoldSecond(Fold),
}

/// The most sources that one reduction takes.
pub const MAX_SOURCES: usize = 256;

/// One thing that a card does.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Work {
    /// Copies bytes within the card's memory.
    Copy {
        /// The source.
        from: Place,
        /// The destination, which does not overlap the source.
        into: Place,
        /// Bytes.
        length: u64,
    },
    /// Repeats four bytes.
    Fill {
        /// The destination.
        into: Place,
        /// Bytes, a multiple of 4.
        length: u64,
        /// What is repeated.
        pattern: u32,
    },
    /// `into = sources[0] op sources[1] op ..`, in that order.
    Reduce {
        /// The destination; it may be one of the sources.
        into: Place,
        /// The operands.
        sources: Vec<Place>,
        /// Elements of each.
        elements: u64,
        /// Type and operation.
        fold: Fold,
        /// What the result is divided by, if more than 1.
        divisor: u32,
    },
    /// `out (m x n, f32) = a (m rows of k) times the transpose of b (n rows of k)`.
    Matmul {
        /// The rows of a.
        a: Place,
        /// The rows of b.
        b: Place,
        /// The product.
        out: Place,
        /// Rows of a, columns of both, rows of b.
        shape: [u64; 3],
        /// GGML's numbers of the types of a and b.
        types: [u32; 2],
    },
    /// Sends bytes to the card at a port.
    Send {
        /// The source.
        from: Place,
        /// Bytes.
        length: u64,
        /// The port.
        port: u32,
        /// What the receiver must expect.
        tag: u32,
    },
    /// Receives bytes from the card at a port.
    Receive {
        /// The destination.
        into: Place,
        /// Bytes.
        length: u64,
        /// The port.
        port: u32,
        /// What the sender must say.
        tag: u32,
        /// What becomes of the bytes.
        landing: Landing,
    },
    /// Waits for everything before it.
    Fence {
        /// And for this card time, in picoseconds, at most 2^63; 0 is any.
        not_before_ps: u64,
    },
}

/// Work and what it waits for.
///
/// Descriptors start in order. Copies, fills, reductions and products are complete before the next one
/// starts. Sends and receives run beside what follows, until a fence.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Descriptor {
    /// The place, from 0, of an earlier send or receive of the same submission that must be complete
    /// first.
    pub after: Option<u32>,
    /// The work.
    pub work: Work,
}

impl From<Work> for Descriptor {
    fn from(work: Work) -> Self {
        Descriptor { after: None, work }
    }
}

/// Why bytes are no descriptors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("descriptor {index}: {reason}")]
pub struct Malformed {
    /// Which descriptor, from 0.
    pub index: usize,
    /// What is wrong with it.
    pub reason: String,
}

/// The bytes of descriptors, end to end.
///
/// ```
/// use spanker_runtime::{BufferId, Place, Work, decode_work, encode_work};
/// let into = Place { buffer: BufferId(1), offset: 0 };
/// let work = [Work::Fill { into, length: 64, pattern: 7 }.into()];
/// assert_eq!(decode_work(&encode_work(&work))?, work);
/// # Ok::<(), spanker_runtime::Malformed>(())
/// ```
#[must_use]
pub fn encode_work(work: &[Descriptor]) -> Vec<u8> {
    let mut out = Vec::with_capacity(work.len() * 64);
    for descriptor in work {
        let after = descriptor.after.map_or(0, |at| at + 1);
        let head = |kind, size: usize| RawWork {
            size: size as u32,
            kind,
            version: WORK_VERSION,
            after,
            reserved: 0,
        };
        encode_one(&descriptor.work, head, &mut out);
    }
    out
}

fn encode_one(work: &Work, head: impl Fn(u16, usize) -> RawWork, out: &mut Vec<u8>) {
    match *work {
        Work::Copy { from, into, length } => {
            let head = head(WORK_COPY, size_of::<RawCopy>());
            push(out, RawCopy { head, from: raw(from), into: raw(into), length });
        }
        Work::Fill { into, length, pattern } => {
            let head = head(WORK_FILL, size_of::<RawFill>());
            push(out, RawFill { head, into: raw(into), length, pattern, reserved: 0 });
        }
        Work::Reduce { into, ref sources, elements, fold, divisor } => {
            let size = size_of::<RawReduce>() + sources.len() * size_of::<RawPlace>();
            let (head, count) = (head(WORK_REDUCE, size), sources.len() as u32);
            let Fold { dtype, op } = fold;
            let into = raw(into);
            push(
                out,
                RawReduce { head, into, elements, r#type: dtype, op, divisor, count, reserved: 0 },
            );
            sources.iter().for_each(|&source| push(out, raw(source)));
        }
        Work::Matmul { a, b, out: product, shape: [m, k, n], types: [a_type, b_type] } => {
            let head = head(WORK_MATMUL, size_of::<RawMatmul>());
            let (a, b) = (raw(a), raw(b));
            push(out, RawMatmul { head, a, b, out: raw(product), m, k, n, a_type, b_type });
        }
        Work::Send { from, length, port, tag } => {
            let head = head(WORK_SEND, size_of::<RawSend>());
            push(out, RawSend { head, from: raw(from), length, port, tag });
        }
        Work::Receive { into, length, port, tag, landing } => {
            let head = head(WORK_RECEIVE, size_of::<RawReceive>());
            let (mode, Fold { dtype, op }) = match landing {
                Landing::Store => (RECEIVE_STORE, Fold { dtype: 0, op: 0 }),
                Landing::FoldFirst(fold) => (RECEIVE_FOLD_FIRST, fold),
                Landing::FoldSecond(fold) => (RECEIVE_FOLD_SECOND, fold),
            };
            let into = raw(into);
            push(
                out,
                RawReceive { head, into, length, port, tag, mode, r#type: dtype, op, reserved: 0 },
            );
        }
        Work::Fence { not_before_ps } => {
            push(out, RawFence { head: head(WORK_FENCE, size_of::<RawFence>()), not_before_ps });
        }
    }
}

/// Reads descriptors. The bytes are hostile until this returns; what they say is not yet true of any
/// card's buffers and ports.
///
/// # Errors
/// [`Malformed`] names the first descriptor that is none.
pub fn decode_work(mut bytes: &[u8]) -> Result<Vec<Descriptor>, Malformed> {
    let mut work: Vec<Descriptor> = Vec::new();
    while !bytes.is_empty() {
        let index = work.len();
        let bad = |reason: String| Malformed { index, reason };
        let head: RawWork = read(bytes).ok_or_else(|| bad("cut off in its head".into()))?;
        let size = head.size as usize;
        if size < size_of::<RawWork>() || !size.is_multiple_of(8) || size > bytes.len() {
            return Err(bad(format!("size {size}, and {} bytes are left", bytes.len())));
        }
        if head.version != WORK_VERSION {
            let version = head.version;
            return Err(bad(format!("version {version}, this card knows {WORK_VERSION}")));
        }
        let (one, rest) = bytes.split_at(size);
        let after = match head.after {
            0 => None,
            at if at as usize <= index && is_transfer(&work[at as usize - 1].work) => Some(at - 1),
            at => return Err(bad(format!("after {at}: no send or receive before it"))),
        };
        work.push(Descriptor { after, work: decode_one(head.kind, one).map_err(bad)? });
        bytes = rest;
    }
    Ok(work)
}

fn is_transfer(work: &Work) -> bool {
    matches!(work, Work::Send { .. } | Work::Receive { .. })
}

fn decode_one(kind: u16, bytes: &[u8]) -> Result<Work, String> {
    Ok(match kind {
        WORK_COPY => {
            let RawCopy { from, into, length, .. } = exactly(bytes)?;
            Work::Copy { from: place(from), into: place(into), length }
        }
        WORK_FILL => {
            let RawFill { into, length, pattern, .. } = exactly(bytes)?;
            if !length.is_multiple_of(4) {
                return Err(format!("fills {length} bytes: not a multiple of 4"));
            }
            Work::Fill { into: place(into), length, pattern }
        }
        WORK_REDUCE => {
            let head: RawReduce = read(bytes).ok_or("cut off")?;
            let count = head.count as usize;
            if count == 0 || count > MAX_SOURCES {
                return Err(format!("{count} sources, from 1 to {MAX_SOURCES} are possible"));
            }
            let listed = &bytes[size_of::<RawReduce>()..];
            if listed.len() != count * size_of::<RawPlace>() {
                return Err(format!("{count} sources in {} bytes", listed.len()));
            }
            let sources = listed
                .chunks_exact(size_of::<RawPlace>())
                .map(|one| place(pod_read_unaligned(one)));
            let fold = Fold { dtype: head.r#type, op: head.op };
            let (into, elements, divisor) = (place(head.into), head.elements, head.divisor);
            Work::Reduce { into, sources: sources.collect(), elements, fold, divisor }
        }
        WORK_MATMUL => {
            let raw: RawMatmul = exactly(bytes)?;
            let (shape, types) = ([raw.m, raw.k, raw.n], [raw.a_type, raw.b_type]);
            Work::Matmul { a: place(raw.a), b: place(raw.b), out: place(raw.out), shape, types }
        }
        WORK_SEND => {
            let RawSend { from, length, port, tag, .. } = exactly(bytes)?;
            Work::Send { from: place(from), length, port, tag }
        }
        WORK_RECEIVE => {
            let raw: RawReceive = exactly(bytes)?;
            let fold = Fold { dtype: raw.r#type, op: raw.op };
            let landing = match raw.mode {
                RECEIVE_STORE => Landing::Store,
                RECEIVE_FOLD_FIRST => Landing::FoldFirst(fold),
                RECEIVE_FOLD_SECOND => Landing::FoldSecond(fold),
                mode => return Err(format!("receive mode {mode} is unknown")),
            };
            let RawReceive { into, length, port, tag, .. } = raw;
            Work::Receive { into: place(into), length, port, tag, landing }
        }
        WORK_FENCE => Work::Fence { not_before_ps: exactly::<RawFence>(bytes)?.not_before_ps },
        kind => return Err(format!("kind {kind} is unknown")),
    })
}

fn push<T: Pod>(out: &mut Vec<u8>, value: T) {
    out.extend_from_slice(bytes_of(&value));
}

fn read<T: Pod>(bytes: &[u8]) -> Option<T> {
    Some(pod_read_unaligned(bytes.get(..size_of::<T>())?))
}

fn exactly<T: Pod>(bytes: &[u8]) -> Result<T, String> {
    match bytes.len() == size_of::<T>() {
        true => Ok(pod_read_unaligned(bytes)),
        false => Err(format!("{} bytes, expected {}", bytes.len(), size_of::<T>())),
    }
}

fn raw(place: Place) -> RawPlace {
    RawPlace { buffer: place.buffer.0, offset: place.offset }
}

fn place(raw: RawPlace) -> Place {
    Place { buffer: BufferId(raw.buffer), offset: raw.offset }
}
