// SPDX-License-Identifier: Apache-2.0
//! The Rust mirror of `include/spanker_ioctl.h`: request numbers, the structs they carry, and the
//! tie between the two. It performs no I/O, and it adds nothing that the header lacks.
//!
//! Programs use the typed calls of [`crate::SpankerControl`]; this module is for those who play a card.

use std::fmt;
use std::str::FromStr;

use bytemuck::{Pod, Zeroable};

use crate::feature::Feature;

/// The major version of the ABI that this crate mirrors; a change breaks older programs.
pub const ABI_VERSION_MAJOR: u16 = 0;
/// The minor version of the ABI that this crate mirrors; a change adds requests.
pub const ABI_VERSION_MINOR: u16 = 5;
/// The patch version of the ABI that this crate mirrors; a change alters neither numbers nor layout.
pub const ABI_VERSION_PATCH: u16 = 0;

/// The type byte that every request of this ABI carries.
pub const MAGIC: u8 = 0xE3;

/// Which way the bytes go that a request names besides its struct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// There are none.
    None,
    /// From the program to the card.
    ToCard,
    /// From the card to the program.
    FromCard,
}

/// Ties a request's number to the struct it carries.
pub trait Request: Pod {
    /// The request's number, with direction, type byte and size encoded.
    const NUMBER: u32;
    /// The request's name in error messages.
    const NAME: &'static str;
    /// Which way its further bytes go. If there are any, the struct begins with their address and length.
    const DIRECTION: Direction = Direction::None;
    /// The feature that a card needs for it; `None` for what every card has.
    const FEATURE: Option<Feature>;
}

macro_rules! mirror {
    ($($(#[$doc:meta])* struct $name:ident = $c_name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
            #[repr(C)]
            pub struct $name { $($(#[$field_doc])* pub $field: $type,)* }
        )*

        /// Sizes, alignments and offsets as Rust sees them, under the names of C.
        #[cfg(test)]
        pub(super) fn layouts() -> Vec<(String, u64)> {
            let mut found = Vec::new();
            $(
                let name = stringify!($c_name);
                found.push((format!("sizeof({name})"), size_of::<$name>() as u64));
                found.push((format!("alignof({name})"), align_of::<$name>() as u64));
                $(
                    let offset = std::mem::offset_of!($name, $field) as u64;
                    found.push((format!("offsetof({name}.{})", stringify!($field)), offset));
                )*
            )*
            found
        }
    };
}

mod work;

pub use work::{
    RawActivate, RawAddPicked, RawAddRow, RawAttend, RawAttendBlocks, RawAttendScores, RawBest,
    RawCombine, RawCopy, RawEmbed, RawFence, RawFill, RawGate, RawHalve, RawKeep, RawKvCache,
    RawMatmul, RawMatmulExperts, RawNorm, RawPick, RawPicks, RawPlace, RawQuantize, RawReceive,
    RawReduce, RawRotate, RawRotateRows, RawRoute, RawRow, RawRows, RawScale, RawSend, RawWork,
    RawWrite,
};

mirror! {
    /// The version that a card speaks.
    struct RawVersion = spanker_version {
        /// See [`AbiVersion::major`].
        major: u16,
        /// See [`AbiVersion::minor`].
        minor: u16,
        /// See [`AbiVersion::patch`].
        patch: u16,
        /// Ignored.
        reserved: u16,
    }
    /// What a card is.
    struct RawCardInfo = spanker_card_info {
        /// Unique among all cards.
        serial: u64,
        /// Bytes of memory for buffers.
        capacity: u64,
        /// Of these, bytes in no buffer.
        available: u64,
        /// The card's clock.
        card_time_ps: u64,
        /// The number in the device's name.
        index: u32,
        /// Link ports.
        ports: u32,
        /// `CARD_*`.
        flags: u32,
        /// The process that has work on the card, or 0.
        owner: u32,
        /// The id of its profile, padded with NUL.
        profile: [u8; 32],
    }
    /// What a port is and what it is connected to.
    struct RawPortInfo = spanker_port_info {
        /// Which port; the caller sets it.
        port: u32,
        /// The hardware's encoding of the link's state.
        state: u32,
        /// Lanes in use.
        lanes: u32,
        /// The port at the other end.
        peer_port: u32,
        /// The card at the other end, or 0.
        peer_serial: u64,
        /// Payload bytes per second by the profile, or 0.
        bandwidth: u64,
        /// One message by the profile.
        latency_ps: u64,
        /// 1: it sends on the same lanes as the card's other ports.
        shared: u32,
        /// 0.
        reserved: u32,
    }
    /// Asks for a buffer.
    struct RawAllocate = spanker_allocate {
        /// Bytes.
        length: u64,
        /// Out: the handle.
        buffer: u64,
    }
    /// Gives a buffer back.
    struct RawFree = spanker_free {
        /// The handle.
        buffer: u64,
    }
    /// Bytes of a buffer, from or to the host.
    struct RawAccess = spanker_access {
        /// The caller's memory; 0 on a socket.
        address: u64,
        /// Bytes.
        length: u64,
        /// The handle.
        buffer: u64,
        /// The first byte.
        offset: u64,
    }
    /// Work.
    struct RawSubmit = spanker_submit {
        /// The caller's memory; 0 on a socket.
        address: u64,
        /// Bytes of descriptors.
        length: u64,
        /// The caller's number for the job.
        job: u64,
        /// Out: what to wait for.
        ticket: u64,
    }
    /// Why a job failed.
    struct RawFault = spanker_fault {
        /// `FAULT_*`.
        kind: u32,
        /// 0.
        reserved: u32,
        /// The culprit's serial.
        card: u64,
        /// For a link, the serial at its other end.
        peer: u64,
        /// The job.
        job: u64,
    }
    /// Waits for work.
    struct RawWait = spanker_wait {
        /// What to wait for.
        ticket: u64,
        /// How long.
        timeout_ns: u64,
        /// Out: the last ticket whose work is complete.
        completed: u64,
        /// Out: when the work was complete.
        card_time_ps: u64,
        /// Out: why it will not be.
        fault: RawFault,
    }
    /// What a card has done since it was switched on.
    struct Counters = spanker_counters {
        /// Descriptors completed.
        work: u64,
        /// Bytes read and written in local memory by work.
        memory_bytes: u64,
        /// Multiply-accumulates.
        multiplications: u64,
        /// Bytes written by hosts.
        host_in: u64,
        /// Bytes read by hosts.
        host_out: u64,
        /// Payload bytes sent to other cards.
        sent: u64,
        /// Payload bytes received from other cards.
        received: u64,
        /// Frames put on the links, replays included.
        frames_sent: u64,
        /// Frames taken from the links.
        frames_received: u64,
        /// Frames sent again.
        frames_replayed: u64,
        /// Frames that arrived broken.
        frames_corrupt: u64,
        /// Trainings after the first.
        retrainings: u64,
        /// Card time in work and in sending, in picoseconds.
        busy_ps: u64,
        /// Card time in waiting for other cards, in picoseconds.
        waiting_ps: u64,
        /// Jobs that failed.
        faults: u64,
        /// 0.
        reserved: u64,
    }
    /// Gives up a job.
    struct RawReset = spanker_reset {
        /// The job; 0 is all jobs of the program.
        job: u64,
        /// What its work fails with.
        fault: RawFault,
    }
    /// What a card is doing.
    struct RawState = spanker_state {
        /// `ACTIVITY_*`.
        activity: u32,
        /// The port at which it waits.
        port: u32,
        /// The card that it waits for, or 0.
        peer: u64,
        /// The job at work, or 0.
        job: u64,
        /// The last ticket given out.
        submitted: u64,
        /// The last ticket whose work is complete.
        completed: u64,
        /// Changes whenever the card gets on with its work.
        progress: u64,
        /// The card's clock.
        card_time_ps: u64,
    }
    /// An entry of the flight recorder.
    struct RawRecord = spanker_record {
        /// Counts up from 1.
        sequence: u64,
        /// The host's monotonic clock, or virtual time.
        wall_ns: u64,
        /// The card's clock.
        card_time_ps: u64,
        /// `RECORD_*`.
        kind: u32,
        /// The port, if it is about one.
        port: u32,
        /// Depends on the kind.
        a: u64,
        /// Depends on the kind.
        b: u64,
    }
    /// Reads the flight recorder.
    struct RawRecords = spanker_records {
        /// The caller's memory; 0 on a socket.
        address: u64,
        /// Bytes that fit.
        length: u64,
        /// The oldest record that is wanted.
        first: u64,
        /// Out: records read.
        count: u64,
    }
    /// The head of a message on a socket.
    struct RawMessage = spanker_message {
        /// [`MESSAGE_MAGIC`].
        magic: u32,
        /// The sender's ABI.
        major: u16,
        /// The sender's ABI.
        minor: u16,
        /// The request.
        number: u32,
        /// In an answer 0 or an errno.
        status: i32,
        /// Chosen by the caller.
        sequence: u64,
        /// Bytes of the request's struct that follow.
        argument: u32,
        /// Bytes that follow those.
        payload: u32,
    }
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr;)*) => {
        $($(#[$doc])* pub const $name: $type = $value;)*

        /// Values as Rust sees them, under the names of C.
        #[cfg(test)]
        fn values() -> Vec<(String, u64)> {
            vec![$((concat!("SPANKER_", stringify!($name)).to_owned(), $name as u64),)*]
        }
    };
}

constants! {
    /// A program plays the card.
    CARD_EMULATED: u32 = 1;
    /// It slows itself down to its profile's speed.
    CARD_PACE_WALL: u32 = 2;
    /// It has no profile's speed.
    CARD_UNSHAPED: u32 = 4;
    /// No signal.
    PORT_DOWN: u32 = 0;
    /// The two ends are finding each other.
    PORT_TRAINING: u32 = 1;
    /// Carries data.
    PORT_UP: u32 = 2;
    /// Gave up.
    PORT_FAULT: u32 = 3;
    /// No fault.
    FAULT_NONE: u32 = 0;
    /// See [`crate::FaultKind::CardLost`].
    FAULT_CARD_LOST: u32 = 1;
    /// See [`crate::FaultKind::LinkDown`].
    FAULT_LINK_DOWN: u32 = 2;
    /// See [`crate::FaultKind::Stuck`].
    FAULT_STUCK: u32 = 3;
    /// See [`crate::FaultKind::Slow`].
    FAULT_SLOW: u32 = 4;
    /// See [`crate::FaultKind::Wrong`].
    FAULT_WRONG: u32 = 5;
    /// See [`crate::FaultKind::Mismatch`].
    FAULT_MISMATCH: u32 = 6;
    /// See [`crate::FaultKind::Aborted`].
    FAULT_ABORTED: u32 = 7;
    /// Nothing to do.
    ACTIVITY_IDLE: u32 = 0;
    /// Computes.
    ACTIVITY_WORKING: u32 = 1;
    /// A peer accepts no more frames.
    ACTIVITY_SENDING: u32 = 2;
    /// Nothing comes from a peer.
    ACTIVITY_RECEIVING: u32 = 3;
    /// Work came in: ticket, descriptors.
    RECORD_SUBMITTED: u32 = 1;
    /// A descriptor started: ticket, kind.
    RECORD_STARTED: u32 = 2;
    /// A descriptor is complete: ticket, kind.
    RECORD_DONE: u32 = 3;
    /// All work of a ticket is complete.
    RECORD_COMPLETE: u32 = 4;
    /// A link changed its state: state, peer.
    RECORD_LINK: u32 = 5;
    /// A job failed: culprit, kind.
    RECORD_FAULT: u32 = 6;
    /// A neighbour reported a fault: culprit, kind.
    RECORD_NOTICE: u32 = 7;
    /// A program gave up a job.
    RECORD_RESET: u32 = 8;
    /// A program came or went: process, 1 or 0.
    RECORD_CLIENT: u32 = 9;
    /// Copy.
    WORK_COPY: u16 = 1;
    /// Fill.
    WORK_FILL: u16 = 2;
    /// Reduce.
    WORK_REDUCE: u16 = 3;
    /// Matrix product.
    WORK_MATMUL: u16 = 4;
    /// Send to a port.
    WORK_SEND: u16 = 5;
    /// Receive from a port.
    WORK_RECEIVE: u16 = 6;
    /// Fence.
    WORK_FENCE: u16 = 7;
    /// Rows of a table.
    WORK_EMBED: u16 = 8;
    /// Root-mean-square norm.
    WORK_NORM: u16 = 9;
    /// Blocks of 8-bit numbers.
    WORK_QUANTIZE: u16 = 10;
    /// Rotation by positions.
    WORK_ROTATE: u16 = 11;
    /// 16-bit floats.
    WORK_HALVE: u16 = 12;
    /// Attention.
    WORK_ATTEND: u16 = 13;
    /// Gate of a feed-forward network.
    WORK_GATE: u16 = 14;
    /// Blocks at a stride.
    WORK_ROWS: u16 = 15;
    /// The largest numbers.
    WORK_BEST: u16 = 16;
    /// Bytes that come with the work.
    WORK_WRITE: u16 = 17;
    /// Sums with one row.
    WORK_ADD_ROW: u16 = 18;
    /// Rotation by positions that lie in memory.
    WORK_ROTATE_ROWS: u16 = 19;
    /// Keys and values into blocks.
    WORK_KEEP: u16 = 20;
    /// Attention over blocks.
    WORK_ATTEND_BLOCKS: u16 = 21;
    /// Experts that rows meet.
    WORK_ROUTE: u16 = 22;
    /// Products with these.
    WORK_MATMUL_EXPERTS: u16 = 23;
    /// Sums of what comes of them.
    WORK_COMBINE: u16 = 24;
    /// Probabilities among all experts.
    GATING_SOFTMAX: u32 = 0;
    /// The same divided by the sum of those that were chosen.
    GATING_SOFTMAX_NORMED: u32 = 1;
    /// Probabilities among those that were chosen.
    GATING_SOFTMAX_OF_CHOSEN: u32 = 2;
    /// For each its own.
    GATING_SIGMOID: u32 = 3;
    /// Scaled and capped numbers.
    WORK_SCALE: u16 = 25;
    /// Gate of a feed-forward network that is not SiLU.
    WORK_ACTIVATE: u16 = 26;
    /// Attention over blocks with a window, a cap or sinks.
    WORK_ATTEND_SCORES: u16 = 27;
    /// Rows of a table that picks add.
    WORK_ADD_PICKED: u16 = 28;
    /// Gates by GELU.
    ACTIVATION_GELU: u32 = 1;
    /// Gates by clamped SiLU.
    ACTIVATION_CLAMPED_SILU: u32 = 2;
    /// Neighbours turn together.
    PAIRS_ADJACENT: u32 = 0;
    /// Numbers of the two halves turn together.
    PAIRS_HALVES: u32 = 1;
    /// The version of every descriptor.
    WORK_VERSION: u16 = 1;
    /// 32-bit float.
    TYPE_F32: u16 = 0;
    /// 64-bit float.
    TYPE_F64: u16 = 1;
    /// 16-bit float.
    TYPE_F16: u16 = 2;
    /// 16-bit brain float.
    TYPE_BF16: u16 = 3;
    /// Signed 32-bit integer.
    TYPE_I32: u16 = 4;
    /// Signed 64-bit integer.
    TYPE_I64: u16 = 5;
    /// Unsigned 8-bit integer.
    TYPE_U8: u16 = 6;
    /// Unsigned 32-bit integer.
    TYPE_U32: u16 = 7;
    /// Sum.
    OP_SUM: u16 = 0;
    /// Product.
    OP_PRODUCT: u16 = 1;
    /// Maximum.
    OP_MAX: u16 = 2;
    /// Minimum.
    OP_MIN: u16 = 3;
    /// Logarithm of the sum of exponentials.
    OP_LOGSUMEXP: u16 = 4;
    /// Bitwise or.
    OP_OR: u16 = 5;
    /// Bitwise and.
    OP_AND: u16 = 6;
    /// Bitwise exclusive or.
    OP_XOR: u16 = 7;
    /// Store what comes.
    RECEIVE_STORE: u16 = 0;
    /// `local = incoming op local`.
    RECEIVE_FOLD_FIRST: u16 = 1;
    /// `local = local op incoming`.
    RECEIVE_FOLD_SECOND: u16 = 2;
    /// "SPKR".
    MESSAGE_MAGIC: u32 = 0x524B_5053;
    /// The most bytes that a message carries besides its struct.
    MESSAGE_MAX_PAYLOAD: u32 = 16 << 20;
}

/// The request that carries no data.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(C)]
pub struct Ping;

/// READ carries the same struct as WRITE under another number.
#[derive(Debug, Clone, Copy, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct RawRead(pub RawAccess);

macro_rules! feature {
    () => {
        None
    };
    ($feature:ident) => {
        Some(Feature::$feature)
    };
}

macro_rules! requests {
    ($($c_name:literal $type:ident = $code:ident($number:literal $(, $size:ty)?) $direction:ident
        $(since $feature:ident)?;)*) => {
        $(impl Request for $type {
            const NUMBER: u32 = nix::$code!(MAGIC, $number $(, size_of::<$size>())?) as u32;
            const NAME: &'static str = $c_name;
            const DIRECTION: Direction = Direction::$direction;
            const FEATURE: Option<Feature> = feature!($($feature)?);
        })*

        /// The request with this number: its name, the size of its struct and where its bytes go.
        #[must_use]
        pub fn request(number: u32) -> Option<(&'static str, usize, Direction)> {
            match number {
                $(<$type as Request>::NUMBER => Some(($c_name, size_of::<$type>(), Direction::$direction)),)*
                _ => None,
            }
        }

        impl Feature {
            /// The feature that a request needs; `None` for those that every card has, and for numbers that are no
            /// request.
            #[must_use]
            pub fn of_request(number: u32) -> Option<Feature> {
                match number {
                    $(<$type as Request>::NUMBER => <$type as Request>::FEATURE,)*
                    _ => None,
                }
            }
        }

        /// Numbers as Rust sees them, under the names of C.
        #[cfg(test)]
        fn numbers() -> Vec<(String, u64)> {
            vec![$((concat!("SPANKER_IOC_", $c_name).to_owned(), u64::from($type::NUMBER)),)*]
        }
    };
}

requests! {
    "PING" Ping = request_code_none(1) None;
    "GET_VERSION" RawVersion = request_code_read(2, RawVersion) None;
    "CARD_INFO" RawCardInfo = request_code_read(3, RawCardInfo) None since CardInfo;
    "PORT_INFO" RawPortInfo = request_code_readwrite(4, RawPortInfo) None since PortInfo;
    "ALLOCATE" RawAllocate = request_code_readwrite(5, RawAllocate) None since Allocate;
    "FREE" RawFree = request_code_write(6, RawFree) None since Free;
    "WRITE" RawAccess = request_code_write(7, RawAccess) ToCard since Write;
    "READ" RawRead = request_code_write(8, RawRead) FromCard since Read;
    "SUBMIT" RawSubmit = request_code_readwrite(9, RawSubmit) ToCard since Submit;
    "WAIT" RawWait = request_code_readwrite(10, RawWait) None since Wait;
    "COUNTERS" Counters = request_code_read(11, Counters) None since Counters;
    "RESET" RawReset = request_code_write(12, RawReset) None since Reset;
    "STATE" RawState = request_code_read(13, RawState) None since State;
    "RECORDS" RawRecords = request_code_readwrite(14, RawRecords) FromCard since Records;
}

/// The version of the ABI that a card speaks.
///
/// # Examples
///
/// ```
/// let version = spanker_runtime::AbiVersion { major: 0, minor: 1, patch: 0 };
/// assert_eq!(version.to_string(), "0.1.0");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AbiVersion {
    /// A difference here breaks older programs.
    pub major: u16,
    /// A difference here means that one side knows more requests.
    pub minor: u16,
    /// A difference here alters neither numbers nor layout.
    pub patch: u16,
}

impl AbiVersion {
    /// The version that this crate speaks.
    pub const OURS: AbiVersion =
        AbiVersion { major: ABI_VERSION_MAJOR, minor: ABI_VERSION_MINOR, patch: ABI_VERSION_PATCH };
}

impl fmt::Display for AbiVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for AbiVersion {
    type Err = String;

    /// Reads `0.2` or `0.2.0`.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("'{text}': expected a version as in 0.2");
        let number = |part: &str| {
            let plain = part.bytes().all(|byte| byte.is_ascii_digit());
            part.parse::<u16>().ok().filter(|_| plain).ok_or_else(bad)
        };
        let parts = text.split('.').map(number).collect::<Result<Vec<u16>, String>>()?;
        match parts[..] {
            [major, minor] => Ok(AbiVersion { major, minor, patch: 0 }),
            [major, minor, patch] => Ok(AbiVersion { major, minor, patch }),
            _ => Err(bad()),
        }
    }
}

impl From<RawVersion> for AbiVersion {
    fn from(raw: RawVersion) -> Self {
        Self { major: raw.major, minor: raw.minor, patch: raw.patch }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};
    use std::fmt::Write;
    use std::process::Command;

    use super::*;
    use crate::cc;

    const HEADER: &str = include_str!("../include/spanker_ioctl.h");

    /// The ABI as Rust sees it, under the names of the header.
    fn mirror() -> BTreeMap<String, u64> {
        let version = [
            ("SPANKER_IOC_MAGIC", u64::from(MAGIC)),
            ("SPANKER_ABI_VERSION_MAJOR", ABI_VERSION_MAJOR.into()),
            ("SPANKER_ABI_VERSION_MINOR", ABI_VERSION_MINOR.into()),
            ("SPANKER_ABI_VERSION_PATCH", ABI_VERSION_PATCH.into()),
        ];
        let version = version.into_iter().map(|(name, value)| (name.to_owned(), value));
        let clean = |(name, value): (String, u64)| (name.replace("r#", ""), value);
        version
            .chain(layouts())
            .chain(work::layouts())
            .chain(values())
            .chain(numbers())
            .chain(crate::feature::values())
            .map(clean)
            .collect()
    }

    /// The names of a header: its definitions, and the sizes and offsets of its structs.
    fn header_names() -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        let mut inside = None;
        for line in HEADER.lines() {
            if let Some((name, _)) =
                line.strip_prefix("#define ").and_then(|rest| rest.split_once(' '))
            {
                names.insert(name.to_owned());
            } else if let Some(rest) = line.strip_prefix("struct ") {
                let name = rest.trim_end_matches(" {").to_owned();
                names.insert(format!("sizeof({name})"));
                names.insert(format!("alignof({name})"));
                inside = Some(name);
            } else if line == "};" {
                inside = None;
            } else if let (Some(name), Some((declaration, _))) = (&inside, line.split_once(';')) {
                let field = declaration.split_whitespace().last().expect("a field");
                let field = field.split('[').next().expect("a name");
                names.insert(format!("offsetof({name}.{field})"));
            }
        }
        names
    }

    /// The ABI as the C compiler sees it.
    fn c_layout() -> BTreeMap<String, u64> {
        let mut program = String::from(
            "#include <stddef.h>\n#include <stdio.h>\n#include \"spanker_ioctl.h\"\nint main(void)\n{\n",
        );
        for name in header_names() {
            let value = match name.split_once('(') {
                Some(("sizeof", rest)) => format!("sizeof(struct {rest}"),
                Some(("alignof", rest)) => format!("_Alignof(struct {rest}"),
                Some((_, rest)) => format!("offsetof(struct {}", rest.replace('.', ", ")),
                None => name.clone(),
            };
            writeln!(program, "printf(\"{name} %lu\\n\", (unsigned long)({value}));")
                .expect("text");
        }
        program.push_str("return 0;\n}\n");
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (source, binary) = (folder.path().join("layout.c"), folder.path().join("layout"));
        std::fs::write(&source, program).expect("a source file");
        cc::compile(&source, &binary, &["-pedantic"]);
        let run = Command::new(&binary).output().expect("the layout program runs");
        assert!(run.status.success(), "the layout program ends with {}", run.status);
        let text = String::from_utf8(run.stdout).expect("text");
        let line = |line: &str| {
            let (name, value) = line.split_once(' ').expect("a name and a value");
            (name.to_owned(), value.parse().expect("a number"))
        };
        text.lines().map(line).collect()
    }

    #[test]
    fn rust_mirror_against_compiled_header_has_same_numbers_and_layout() {
        let (mirror, header) = (mirror(), c_layout());
        assert!(header.len() > 200, "the header was read: {}", header.len());
        assert_eq!(mirror, header);
    }

    /// Requests and kinds of work that a header defines and for which it does not say since when.
    fn undated(names: &BTreeSet<String>) -> Vec<&str> {
        // Every card has the first two requests; the magic number is none, and the version is of no kind.
        const ALWAYS: [&str; 4] = ["IOC_MAGIC", "IOC_PING", "IOC_GET_VERSION", "WORK_VERSION"];
        let bare = |name: &'_ str| name.strip_prefix("SPANKER_").map(str::to_owned);
        let dated = |bare: &str| {
            let dated = format!("SPANKER_SINCE_{}", bare.strip_prefix("IOC_").unwrap_or(bare));
            ALWAYS.contains(&bare) || names.contains(&dated)
        };
        let named = |bare: &str| bare.starts_with("IOC_") || bare.starts_with("WORK_");
        let names = names.iter().map(String::as_str);
        names.filter(|name| bare(name).is_some_and(|bare| named(&bare) && !dated(&bare))).collect()
    }

    #[test]
    fn every_request_and_kind_of_work_of_the_header_has_a_version_since_which_it_is_there() {
        let mut names = header_names();
        assert_eq!(undated(&names), [""; 0]);
        for name in ["SPANKER_SINCE_READ", "SPANKER_SINCE_WORK_GATE"] {
            assert!(names.remove(name), "{name}");
        }
        assert_eq!(undated(&names), ["SPANKER_IOC_READ", "SPANKER_WORK_GATE"]);
    }

    #[test]
    fn requests_have_the_feature_of_their_name_and_the_first_two_have_none() {
        for (name, number) in numbers() {
            let name = name.trim_start_matches("SPANKER_IOC_");
            let feature = Feature::of_request(number as u32).map(Feature::name);
            match name {
                "PING" | "GET_VERSION" => assert_eq!(feature, None),
                name => assert_eq!(feature, Some(&*format!("request {name}"))),
            }
        }
    }

    #[test]
    fn versions_are_read_as_they_are_written_and_nothing_else_is_one() {
        for version in [AbiVersion::OURS, AbiVersion { major: 7, minor: 8, patch: 9 }] {
            assert_eq!(version.to_string().parse(), Ok(version));
        }
        assert_eq!("0.2".parse(), Ok(AbiVersion { major: 0, minor: 2, patch: 0 }));
        for bad in ["", "0", "0.", ".2", "0.2.", "0.2.0.1", "0.x", "0.65536", "-0.2", "+0.2"] {
            let error = bad.parse::<AbiVersion>().expect_err("no version");
            assert!(error.contains(&format!("'{bad}'")), "{error}");
        }
    }

    #[test]
    fn requests_with_bytes_begin_with_address_and_length() {
        let offsets: BTreeMap<String, u64> = layouts().into_iter().collect();
        for name in ["spanker_access", "spanker_submit", "spanker_records"] {
            assert_eq!(offsets[&format!("offsetof({name}.address)")], 0);
            assert_eq!(offsets[&format!("offsetof({name}.length)")], 8);
        }
    }

    #[test]
    fn request_of_unknown_number_is_none() {
        assert_eq!(request(RawWait::NUMBER), Some(("WAIT", 64, Direction::None)));
        assert_eq!(request(0), None);
    }
}
