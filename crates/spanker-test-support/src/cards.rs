// SPDX-License-Identifier: Apache-2.0
//! Cards in this process, without time: an interpreter of descriptors behind the handle that real cards have.
//! Ports are as unforgiving as the contract allows: a send waits for its receive, sends of a card wait for
//! each other, and work that waits for a transfer holds up what follows.

use std::collections::{HashMap, VecDeque};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytemuck::{Pod, bytes_of, pod_collect_to_vec, pod_read_unaligned};
use nix::errno::Errno;
use spanker_collective::{DType, ReduceOp};
use spanker_reduce::{Element, Team, Threads, bf16, divide, f16, reduce};
use spanker_runtime::abi::{
    ACTIVITY_IDLE, ACTIVITY_RECEIVING, ACTIVITY_SENDING, ACTIVITY_WORKING, CARD_EMULATED, Counters,
    Direction, PORT_DOWN, PORT_UP, RawAccess, RawAllocate, RawCardInfo, RawFault, RawFree,
    RawPortInfo, RawReset, RawState, RawSubmit, RawVersion, RawWait, request,
};
use spanker_runtime::message::{Parsed, head, parse};
use spanker_runtime::{
    Call, Descriptor, Error, Fault, FaultKind, Fold, Landing, Payload, Place, SpankerControl,
    Transport, Work, decode_work,
};

/// What is the matter with a card.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// Does what it should.
    Well,
    /// Its process has ended.
    Gone,
    /// Does not answer.
    Silent,
    /// Answers with something that is no answer.
    Nonsense,
    /// Answers, and does nothing more.
    Frozen,
    /// Is at work for another program.
    Busy,
    /// Gets every sum wrong.
    Corrupt,
    /// Changes what it passes on to others, and computes well.
    Garbling,
    /// Leaves the last operand out of every sum.
    Dropping,
    /// Sends the two halves of every message in each other's place.
    Swapping,
    /// Gets these bytes of every sum wrong that has them.
    Blemished(usize, usize),
}

#[derive(Debug)]
struct Entry {
    job: u64,
    after: Option<usize>,
    work: Work,
    done: bool,
}

#[derive(Debug)]
struct Card {
    peers: Vec<(usize, u32, bool)>,
    buffers: HashMap<u64, Vec<u8>>,
    given: u64,
    queue: Vec<Entry>,
    next: usize,
    sends: VecDeque<usize>,
    receives: Vec<VecDeque<usize>>,
    /// Where each ticket's work ends, and what it failed with.
    tickets: Vec<(usize, Option<Fault>)>,
    progress: u64,
    clock: u64,
    health: Health,
    /// What it will come down with, and after how many descriptors.
    ailment: Option<(u64, Health)>,
    /// Card time that each descriptor costs, and that all have cost.
    cost: u64,
    busy: u64,
}

#[derive(Debug)]
struct World {
    cards: Vec<Card>,
    strict: bool,
    capacity: usize,
    /// The most bytes that a card allocates at once.
    memory: u64,
    /// A request that a card refuses, and with what.
    refusal: Option<(usize, &'static str, Errno)>,
}

/// A handful of cards.
#[derive(Debug, Clone)]
pub struct Cards(Arc<Mutex<World>>);

#[derive(Debug)]
struct Way {
    cards: Cards,
    card: usize,
}

impl Cards {
    /// Cards with links (card, port, card, port).
    pub fn new(count: usize, links: &[(usize, u32, usize, u32)]) -> Cards {
        let card = |card: usize| {
            let ends = links.iter().flat_map(|&(a, p, b, q)| [(a, p, b, q), (b, q, a, p)]);
            let mut peers: Vec<_> = ends.filter(|end| end.0 == card).collect();
            peers.sort_unstable();
            let peers: Vec<_> = peers.into_iter().map(|(_, _, b, q)| (b, q, true)).collect();
            Card {
                receives: vec![VecDeque::new(); peers.len()],
                peers,
                buffers: HashMap::new(),
                given: 0,
                queue: Vec::new(),
                next: 0,
                sends: VecDeque::new(),
                tickets: Vec::new(),
                progress: 0,
                clock: 1000 * card as u64,
                health: Health::Well,
                ailment: None,
                cost: 1_000_000,
                busy: 0,
            }
        };
        let cards = (0..count).map(card).collect();
        let (strict, capacity, memory) = (true, usize::MAX, 1 << 32);
        Cards(Arc::new(Mutex::new(World { cards, strict, capacity, memory, refusal: None })))
    }

    /// Cards in a ring.
    pub fn ring(count: usize) -> Cards {
        Cards::new(count, &ring(count))
    }

    /// Handles to all cards.
    pub fn open(&self) -> Vec<SpankerControl> {
        let count = self.world().cards.len();
        let way = |card| Box::new(Way { cards: self.clone(), card });
        (0..count).map(|card| SpankerControl::over(way(card))).collect()
    }

    /// Puts a socket for each card into a folder, as programs that play cards do.
    pub fn serve(&self, folder: &Path) {
        for card in 0..self.world().cards.len() {
            let listener = UnixListener::bind(folder.join(format!("spanker{card}"))).unwrap();
            let cards = self.clone();
            std::thread::spawn(move || {
                while let Ok((stream, _)) = listener.accept() {
                    let way = Way { cards: cards.clone(), card };
                    std::thread::spawn(move || serve_one(stream, &way));
                }
            });
        }
    }

    /// Whether work that waits for a transfer holds up everything after it, or only sends.
    pub fn strict(&self, strict: bool) {
        self.world().strict = strict;
    }

    /// Descriptors that a card's queue takes.
    pub fn capacity(&self, capacity: usize) {
        self.world().capacity = capacity;
    }

    /// Bytes that a card allocates at once.
    pub fn memory(&self, most: u64) {
        self.world().memory = most;
    }

    /// From now on a card refuses a request.
    pub fn refuse(&self, card: usize, op: &'static str, errno: Errno) {
        self.world().refusal = Some((card, op, errno));
    }

    /// A card comes down with something after so many more descriptors.
    pub fn ail(&self, card: usize, after: u64, health: Health) {
        let mut world = self.world();
        let progress = world.cards[card].progress;
        world.cards[card].ailment = Some((progress + after, health));
    }

    /// Card time of each descriptor from now on.
    pub fn cost(&self, card: usize, ps: u64) {
        self.world().cards[card].cost = ps;
    }

    /// Takes the link between two cards down.
    pub fn cut(&self, a: usize, b: usize) {
        let mut world = self.world();
        for (here, there) in [(a, b), (b, a)] {
            for peer in &mut world.cards[here].peers {
                peer.2 &= peer.0 != there;
            }
        }
    }

    /// Buffers that have not been given back, on all cards.
    pub fn buffers(&self) -> usize {
        self.world().cards.iter().map(|card| card.buffers.len()).sum()
    }

    /// The faults with which tickets failed, card by card.
    pub fn faults(&self) -> Vec<Option<Fault>> {
        let last = |card: &Card| card.tickets.last().and_then(|ticket| ticket.1);
        self.world().cards.iter().map(last).collect()
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Port 0 of each card to port 1 of the next.
pub fn ring(count: usize) -> Vec<(usize, u32, usize, u32)> {
    match count {
        0 | 1 => Vec::new(),
        2 => vec![(0, 0, 1, 0)],
        _ => (0..count).map(|card| (card, 0, (card + 1) % count, 1)).collect(),
    }
}

fn serial(card: usize) -> u64 {
    0xca7d_0000 + card as u64
}

impl World {
    /// Does all that can be done.
    fn run(&mut self) {
        loop {
            let before: u64 = self.cards.iter().map(|card| card.progress).sum();
            for card in 0..self.cards.len() {
                self.sicken(card);
                if !matches!(
                    self.cards[card].health,
                    Health::Frozen | Health::Gone | Health::Silent
                ) {
                    self.advance(card);
                    self.send(card);
                }
            }
            if before == self.cards.iter().map(|card| card.progress).sum::<u64>() {
                return;
            }
        }
    }

    fn sicken(&mut self, card: usize) {
        let progress = self.cards[card].progress;
        let due = |&mut (after, _): &mut (u64, Health)| progress >= after;
        let Some((_, health)) = self.cards[card].ailment.take_if(due) else { return };
        self.cards[card].health = health;
        self.cards[card].progress += 1;
        if health == Health::Gone {
            let job = self.cards[card].queue.last().map_or(0, |entry| entry.job);
            self.fail(Fault { kind: FaultKind::CardLost, card: serial(card), peer: 0, job });
        }
    }

    /// Fails a job on every card.
    fn fail(&mut self, fault: Fault) {
        for card in 0..self.cards.len() {
            self.fail_on(card, fault);
        }
    }

    fn fail_on(&mut self, card: usize, fault: Fault) {
        let card = &mut self.cards[card];
        for (end, failed) in &mut card.tickets {
            if *end > 0 && card.queue[*end - 1].job == fault.job && !card.queue[*end - 1].done {
                *failed = failed.or(Some(fault));
            }
        }
        for entry in card.queue.iter_mut().filter(|entry| entry.job == fault.job) {
            entry.done = true;
        }
        card.sends.clear();
        card.receives.iter_mut().for_each(VecDeque::clear);
        card.next = card.queue.len();
        card.progress += 1;
    }

    /// Starts what can be started, in order.
    fn advance(&mut self, number: usize) {
        let strict = self.strict;
        let card = &mut self.cards[number];
        while let Some(entry) = card.queue.get(card.next) {
            let at = card.next;
            let ready = entry.after.is_none_or(|after| card.queue[after].done);
            if !ready && (strict || !matches!(entry.work, Work::Send { .. })) {
                return;
            }
            match entry.work.clone() {
                Work::Send { .. } => card.sends.push_back(at),
                Work::Receive { port, .. } => card.receives[port as usize].push_back(at),
                Work::Fence { not_before_ps } => {
                    if card.queue[..at].iter().any(|entry| !entry.done) {
                        return;
                    }
                    card.clock = card.clock.max(not_before_ps);
                    card.queue[at].done = true;
                }
                work => {
                    card.compute(&work);
                    card.queue[at].done = true;
                    card.clock += card.cost;
                    card.busy += card.cost;
                }
            }
            card.next += 1;
            card.progress += 1;
        }
    }

    /// Matches the first send of a card with the first receive at the other end.
    fn send(&mut self, number: usize) {
        let card = &self.cards[number];
        let Some(&at) = card.sends.front() else { return };
        let entry = &card.queue[at];
        let Work::Send { from, length, port, tag } = entry.work else { return };
        if entry.after.is_some_and(|after| !card.queue[after].done) {
            return;
        }
        let (there, back, up) = card.peers[port as usize];
        let job = entry.job;
        if !up {
            let (card, peer) = (serial(number), serial(there));
            self.fail(Fault { kind: FaultKind::LinkDown, card, peer, job });
            return;
        }
        let mut bytes = card.bytes(from, length).to_vec();
        let half = bytes.len() / 2;
        match card.health {
            Health::Garbling if !bytes.is_empty() => bytes[0] ^= 1,
            Health::Swapping => bytes.rotate_left(half),
            _ => {}
        }
        let sent = card.clock + card.cost;
        let peer = &mut self.cards[there];
        let Some(&to) = peer.receives[back as usize].front() else { return };
        let Work::Receive { into, length: expected, tag: wanted, landing, .. } =
            peer.queue[to].work
        else {
            return;
        };
        if (tag, length, job) != (wanted, expected, peer.queue[to].job) {
            let (kind, card) = (FaultKind::Mismatch, serial(number));
            self.fail(Fault { kind, card, peer: serial(there), job });
            return;
        }
        peer.land(into, &bytes, landing);
        peer.receives[back as usize].pop_front();
        peer.queue[to].done = true;
        peer.progress += 1;
        peer.clock = peer.clock.max(sent);
        let card = &mut self.cards[number];
        card.sends.pop_front();
        card.queue[at].done = true;
        card.progress += 1;
        card.clock = sent;
        card.busy += card.cost;
    }
}

impl Card {
    fn bytes(&self, place: Place, length: u64) -> &[u8] {
        if length == 0 {
            return &[];
        }
        let start = place.offset as usize;
        &self.buffers[&place.buffer.0][start..start + length as usize]
    }

    fn store(&mut self, place: Place, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        let start = place.offset as usize;
        let buffer = self.buffers.get_mut(&place.buffer.0).expect("a buffer");
        buffer[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn land(&mut self, into: Place, bytes: &[u8], landing: Landing) {
        let local = self.bytes(into, bytes.len() as u64).to_vec();
        let landed = match landing {
            Landing::Store => bytes.to_vec(),
            Landing::FoldFirst(fold) => folded(fold, &[bytes, &local], 0),
            Landing::FoldSecond(fold) => folded(fold, &[&local, bytes], 0),
        };
        self.store(into, &landed);
    }

    fn compute(&mut self, work: &Work) {
        match work {
            Work::Copy { from, into, length } => {
                let bytes = self.bytes(*from, *length).to_vec();
                self.store(*into, &bytes);
            }
            Work::Reduce { into, sources, elements, fold, divisor } => {
                let size = DType::from_code(fold.dtype).expect("a type").size() as u64;
                let mut operands: Vec<&[u8]> =
                    sources.iter().map(|&source| self.bytes(source, elements * size)).collect();
                if self.health == Health::Dropping && operands.len() > 1 {
                    operands.pop();
                }
                let mut result = folded(*fold, &operands, *divisor);
                match self.health {
                    Health::Corrupt if !result.is_empty() => result[0] ^= 1,
                    Health::Blemished(from, to) if to <= result.len() => {
                        result[from..to].iter_mut().for_each(|byte| *byte ^= 1);
                    }
                    _ => {}
                }
                self.store(*into, &result);
            }
            other => panic!("{other:?} is no work of a collective"),
        }
    }

    fn activity(&self) -> (u32, u32, u64) {
        if self.next >= self.queue.len() && self.queue.iter().all(|entry| entry.done) {
            return (ACTIVITY_IDLE, 0, 0);
        }
        if self.health == Health::Frozen {
            return (ACTIVITY_WORKING, 0, 0);
        }
        let receiving = self.receives.iter().position(|queue| !queue.is_empty());
        if let Some(port) = receiving {
            return (ACTIVITY_RECEIVING, port as u32, serial(self.peers[port].0));
        }
        match self.sends.front().map(|&at| &self.queue[at].work) {
            Some(&Work::Send { port, .. }) => {
                (ACTIVITY_SENDING, port, serial(self.peers[port as usize].0))
            }
            _ => (ACTIVITY_WORKING, 0, 0),
        }
    }

    fn completed(&self) -> u64 {
        let complete = |&(end, fault): &(usize, Option<Fault>)| {
            fault.is_none() && self.queue[..end].iter().all(|entry| entry.done)
        };
        self.tickets.iter().rposition(complete).map_or(0, |at| at as u64 + 1)
    }
}

fn folded(fold: Fold, operands: &[&[u8]], divisor: u32) -> Vec<u8> {
    fn of<T: Element + Pod>(op: ReduceOp, operands: &[&[u8]], divisor: u32) -> Vec<u8> {
        let operands: Vec<Vec<T>> = operands.iter().map(|o| pod_collect_to_vec(o)).collect();
        let mut out = operands[0].clone();
        reduce(&Team::new(1), Threads::Exactly(1), &operands, &mut out, op).expect("a fold");
        if divisor > 1 {
            divide(&mut out, divisor as usize);
        }
        bytemuck::cast_slice(&out).to_vec()
    }
    let op = ReduceOp::from_code(fold.op).expect("an operation");
    match DType::from_code(fold.dtype).expect("a type") {
        DType::F32 => of::<f32>(op, operands, divisor),
        DType::F64 => of::<f64>(op, operands, divisor),
        DType::F16 => of::<f16>(op, operands, divisor),
        DType::Bf16 => of::<bf16>(op, operands, divisor),
        DType::I32 => of::<i32>(op, operands, divisor),
        DType::I64 => of::<i64>(op, operands, divisor),
        DType::U8 => of::<u8>(op, operands, divisor),
        DType::U32 => of::<u32>(op, operands, divisor),
        other => panic!("{other} is not known"),
    }
}

impl Transport for Way {
    fn call(&self, call: &mut Call<'_>) -> Result<(), Error> {
        let mut world = self.cards.world();
        world.sicken(self.card);
        let op = call.name;
        match world.cards[self.card].health {
            Health::Gone => return Err(Error::Gone { op }),
            Health::Silent => return Err(Error::Unresponsive { op, waited: call.timeout }),
            Health::Nonsense => {
                return Err(Error::Nonsense { op, what: "it begins with 00000000".into() });
            }
            _ => {}
        }
        let refused = |source| Err(Error::Ioctl { op, source });
        if let Some((card, known, errno)) = world.refusal
            && (card, known) == (self.card, op)
        {
            return refused(errno);
        }
        match answer(&mut world, self.card, call) {
            Ok(()) => Ok(()),
            Err(errno) => refused(errno),
        }
    }
}

/// Answers a client until it goes away, or until the card does.
fn serve_one(mut stream: UnixStream, way: &Way) {
    let mut bytes = Vec::new();
    loop {
        let message = match parse(&bytes) {
            Parsed::Request(message) => message,
            Parsed::Incomplete(needed) => {
                let known = bytes.len();
                bytes.resize(needed, 0);
                if stream.read_exact(&mut bytes[known..]).is_err() {
                    return;
                }
                continue;
            }
            Parsed::Refused { .. } => return,
        };
        let (number, sequence, used) = (message.number, message.sequence, message.used);
        let Some((name, _, direction)) = request(number) else { return };
        let mut argument = message.argument.to_vec();
        let mut out = match direction {
            Direction::FromCard => vec![0; pod_read_unaligned::<u64>(&argument[8..16]) as usize],
            _ => Vec::new(),
        };
        let payload = match direction {
            Direction::None => Payload::Empty,
            Direction::ToCard => Payload::ToCard(message.payload),
            Direction::FromCard => Payload::FromCard(&mut out),
        };
        let timeout = Duration::ZERO;
        let argument_mut = &mut argument[..];
        let mut call = Call { name, number, argument: argument_mut, payload, timeout };
        let answer = match way.call(&mut call) {
            Ok(()) => {
                let head = head(number, 0, sequence, argument.len(), out.len());
                [&head[..], &argument, &out].concat()
            }
            Err(Error::Ioctl { source, .. }) => {
                head(number, source as i32, sequence, 0, 0).to_vec()
            }
            Err(Error::Unresponsive { .. }) => Vec::new(),
            Err(Error::Nonsense { .. }) => vec![0; 32],
            Err(_) => return,
        };
        if stream.write_all(&answer).is_err() {
            return;
        }
        bytes.drain(..used);
    }
}

fn get<T: Pod>(call: &Call<'_>) -> T {
    pod_read_unaligned(call.argument)
}

fn put<T: Pod>(call: &mut Call<'_>, value: T) -> Result<(), Errno> {
    call.argument.copy_from_slice(bytes_of(&value));
    Ok(())
}

fn answer(world: &mut World, number: usize, call: &mut Call<'_>) -> Result<(), Errno> {
    if call.name == "WAIT" {
        world.run();
    }
    let (capacity, memory) = (world.capacity, world.memory);
    let card = &mut world.cards[number];
    match call.name {
        "GET_VERSION" => put(call, RawVersion { major: 0, minor: 3, patch: 0, reserved: 0 }),
        "CARD_INFO" => put(call, info(card, number)),
        "PORT_INFO" => {
            let mut raw: RawPortInfo = get(call);
            let &(peer, port, up) = card.peers.get(raw.port as usize).ok_or(Errno::EINVAL)?;
            raw.state = if up { PORT_UP } else { PORT_DOWN };
            (raw.peer_serial, raw.peer_port, raw.lanes) = (serial(peer), port, 4);
            put(call, raw)
        }
        "ALLOCATE" => {
            let mut raw: RawAllocate = get(call);
            if raw.length == 0 || raw.length > memory {
                return Err(if raw.length == 0 { Errno::EINVAL } else { Errno::ENOMEM });
            }
            card.given += 1;
            raw.buffer = card.given;
            card.buffers.insert(raw.buffer, vec![0; raw.length as usize]);
            put(call, raw)
        }
        "FREE" => card.buffers.remove(&get::<RawFree>(call).buffer).map(drop).ok_or(Errno::EINVAL),
        "WRITE" | "READ" => access(card, call),
        "SUBMIT" => submit(card, call, capacity),
        "WAIT" => wait(card, call),
        "COUNTERS" => put(call, Counters { busy_ps: card.busy, ..Counters::default() }),
        "RESET" => {
            let raw: RawReset = get(call);
            world.fail_on(number, raw.fault.fault().expect("a fault"));
            Ok(())
        }
        "STATE" => put(call, state(card)),
        _ => Err(Errno::ENOTTY),
    }
}

fn info(card: &Card, number: usize) -> RawCardInfo {
    let mut profile = [0; 32];
    profile[..5].copy_from_slice(b"rev-a");
    RawCardInfo {
        serial: serial(number),
        // As much as a rev-a has for buffers.
        capacity: (1 << 32) - (64 << 20),
        available: (1 << 32) - (64 << 20),
        card_time_ps: card.clock,
        index: number as u32,
        ports: card.peers.len() as u32,
        flags: CARD_EMULATED,
        owner: 0,
        profile,
    }
}

fn state(card: &Card) -> RawState {
    let (activity, port, peer) = card.activity();
    let last = card.queue.last().map_or(0, |entry| entry.job);
    RawState {
        activity,
        port,
        peer,
        job: if activity == ACTIVITY_IDLE { 0 } else { last },
        submitted: card.tickets.len() as u64,
        completed: card.completed(),
        progress: card.progress,
        card_time_ps: card.clock,
    }
}

fn access(card: &mut Card, call: &mut Call<'_>) -> Result<(), Errno> {
    let raw: RawAccess = get(call);
    let buffer = card.buffers.get_mut(&raw.buffer).ok_or(Errno::EINVAL)?;
    let range = raw.offset as usize..(raw.offset + raw.length) as usize;
    let bytes = buffer.get_mut(range).ok_or(Errno::EINVAL)?;
    match &mut call.payload {
        Payload::ToCard(from) => bytes.copy_from_slice(from),
        Payload::FromCard(into) => into.copy_from_slice(bytes),
        Payload::Empty => {}
    }
    Ok(())
}

fn submit(card: &mut Card, call: &mut Call<'_>, capacity: usize) -> Result<(), Errno> {
    let mut raw: RawSubmit = get(call);
    let Payload::ToCard(bytes) = call.payload else { return Err(Errno::EINVAL) };
    let work = decode_work(bytes).map_err(|_| Errno::EINVAL)?;
    if card.health == Health::Busy {
        return Err(Errno::EBUSY);
    }
    let waiting = card.queue.iter().filter(|entry| !entry.done).count();
    if waiting > 0 && waiting + work.len() > capacity {
        return Err(Errno::EOVERFLOW);
    }
    let base = card.queue.len();
    card.queue.extend(work.into_iter().map(|Descriptor { after, work }| Entry {
        job: raw.job,
        after: after.map(|after| base + after as usize),
        work,
        done: false,
    }));
    card.tickets.push((card.queue.len(), None));
    raw.ticket = card.tickets.len() as u64;
    put(call, raw)
}

fn wait(card: &mut Card, call: &mut Call<'_>) -> Result<(), Errno> {
    let mut raw: RawWait = get(call);
    let &(_, fault) = card.tickets.get(raw.ticket as usize - 1).ok_or(Errno::EINVAL)?;
    raw.fault = fault.map_or_else(RawFault::default, RawFault::from);
    raw.completed = card.completed();
    raw.card_time_ps = card.clock;
    put(call, raw)
}
