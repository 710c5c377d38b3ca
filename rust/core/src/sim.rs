//! All ranks of a collective at once, in virtual time, with no sockets and no threads.
//!
//! The same [`Executor`] that the engine runs walks every rank's schedule. Messages take the time
//! of a link model: latency, and a rate for each rank's way out and in, which the connections to its
//! peers share by turns, as TCP streams share a cable; arithmetic is free. What a
//! message carries is read from memory when it has *left*, so a schedule that reuses memory too
//! early computes a wrong result here.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::Arc;

use crate::dtype::{DType, ReduceOp};
use crate::error::{Error, Result};
use crate::executor::{Executor, Io, Started};
use crate::reduce;
use crate::schedule::{Buf, Loc, Place, Schedule, Span};

/// The link model. Times in seconds, rates in bytes per second.
#[derive(Clone, Debug)]
pub struct Net {
    /// From the last byte sent to the last byte received, on an idle link.
    pub latency: f64,
    /// What each rank can send, and at the same time receive.
    pub rate: Vec<f64>,
    /// Adds up to this many seconds of pseudo-random delay to each message.
    pub jitter: f64,
}

impl Net {
    /// `world` equal ranks.
    pub fn uniform(world: usize, latency: f64, rate: f64) -> Self {
        Self { latency, rate: vec![rate; world], jitter: 0.0 }
    }
}

/// One rank: its schedule and its memory.
#[derive(Clone, Debug)]
pub struct Rank {
    /// What it does.
    pub schedule: Arc<Schedule>,
    /// `In`; also `Out` where `output` is `None` (in place).
    pub input: Vec<u8>,
    /// `Out`, where it is another memory.
    pub output: Option<Vec<u8>>,
}

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Report {
    /// Seconds until the last rank was done.
    pub time: f64,
    /// Bytes that each rank sent.
    pub sent: Vec<u64>,
    /// Messages that each rank sent.
    pub messages: Vec<u64>,
    /// Each rank's output.
    pub output: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Sent { rank: usize, step: u32, to: Place, tag: u32 },
    Arrived { rank: usize, from: Place, tag: u32, message: usize },
    Passed { rank: usize, step: u32 },
}

struct Memory {
    bufs: [Vec<u8>; 4],
    in_place: bool,
}

struct World<'a> {
    dtype: DType,
    op: ReduceOp,
    net: &'a Net,
    hosts: &'a [Vec<Place>],
    now: f64,
    memory: Vec<Memory>,
    /// By rank and peer, what waits for its turn: step, tag and span.
    out: Vec<Vec<VecDeque<(u32, u32, Span)>>>,
    /// Whether a rank is sending, and to whom it sent last.
    sending: Vec<(bool, usize)>,
    in_free: Vec<f64>,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    order: u64,
    random: u64,
    spans: HashMap<(usize, u32), Span>,
    messages: Vec<Vec<u8>>,
    mailbox: HashMap<(usize, Place, u32), usize>,
    barriers: HashMap<(usize, u32), Vec<(usize, u32)>>,
    sent: Vec<u64>,
    count: Vec<u64>,
}

impl World<'_> {
    fn at(&mut self, time: f64, event: Event) {
        // Times are positive, so their bits sort as they do; the counter keeps ties in order.
        self.order += 1;
        self.queue.push(Reverse((time.to_bits(), self.order, event)));
    }

    /// Sends the next message of a rank whose way out is free: the peers have it by turns.
    fn send_next(&mut self, me: usize) {
        let (busy, last) = self.sending[me];
        let n = self.out[me].len();
        let Some(to) = (1..=n).map(|d| (last + d) % n).find(|&p| !busy && !self.out[me][p].is_empty()) else {
            return;
        };
        let Some((step, tag, span)) = self.out[me][to].pop_front() else { return };
        let bytes = span.len * self.dtype.size();
        self.sending[me] = (true, to);
        self.sent[me] += bytes as u64;
        self.count[me] += 1;
        self.spans.insert((me, step), span);
        let end = self.now + bytes as f64 / self.net.rate[me];
        self.at(end, Event::Sent { rank: me, step, to: to as u32, tag });
    }

    fn bytes(&mut self, rank: usize, span: Span) -> Result<&mut [u8]> {
        let memory = &mut self.memory[rank];
        let buf = if memory.in_place && span.buf == Buf::Out { Buf::In } else { span.buf };
        let size = self.dtype.size();
        let (from, to) = (span.start * size, (span.start + span.len) * size);
        memory.bufs[buf as usize]
            .get_mut(from..to)
            .ok_or_else(|| Error::misuse(format!("sim: rank {rank} has no {span:?}")))
    }

    fn jitter(&mut self) -> f64 {
        // Knuth's MMIX generator: enough to shuffle arrivals.
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        self.net.jitter * (self.random >> 11) as f64 / (1u64 << 53) as f64
    }
}

struct Wire<'a, 'b> {
    me: usize,
    world: &'a mut World<'b>,
}

impl Io for Wire<'_, '_> {
    fn send(&mut self, step: u32, to: Place, tag: u32, span: Span) -> Result<Started> {
        self.world.out[self.me][to as usize].push_back((step, tag, span));
        self.world.send_next(self.me);
        Ok(Started::Later)
    }

    fn recv(&mut self, step: u32, from: Place, tag: u32, span: Span) -> Result<Started> {
        let w = &mut *self.world;
        let Some(message) = w.mailbox.remove(&(self.me, from, tag)) else {
            w.spans.insert((self.me, step), span);
            return Ok(Started::Later);
        };
        deliver(w, self.me, span, message)?;
        Ok(Started::Done)
    }

    fn reduce(&mut self, _step: u32, from: &[Loc], to: &[Loc], finish: bool) -> Result<Started> {
        let w = &mut *self.world;
        let mut sources = Vec::with_capacity(from.len());
        for loc in from {
            sources.push(w.bytes(loc.place as usize, loc.span)?.to_vec());
        }
        let sources: Vec<&[u8]> = sources.iter().map(Vec::as_slice).collect();
        let mut out = vec![0; sources.first().map_or(0, |s| s.len())];
        let divide_by = finish.then_some(w.memory.len() as u32);
        reduce::fold(w.dtype, w.op, divide_by, &sources, &mut out)?;
        for loc in to {
            w.bytes(loc.place as usize, loc.span)?.copy_from_slice(&out);
        }
        Ok(Started::Done)
    }

    fn barrier(&mut self, step: u32, ordinal: u32) -> Result<Started> {
        let w = &mut *self.world;
        let host = w.hosts.iter().position(|h| h.contains(&(self.me as u32))).unwrap_or_default();
        let arrived = w.barriers.entry((host, ordinal)).or_default();
        arrived.push((self.me, step));
        if arrived.len() == w.hosts[host].len() {
            for (rank, step) in w.barriers.remove(&(host, ordinal)).unwrap_or_default() {
                w.at(w.now, Event::Passed { rank, step });
            }
        }
        Ok(Started::Later)
    }
}

fn deliver(w: &mut World<'_>, rank: usize, span: Span, message: usize) -> Result<()> {
    let data = std::mem::take(&mut w.messages[message]);
    let to = w.bytes(rank, span)?;
    if data.len() != to.len() {
        return Err(Error::misuse(format!("sim: rank {rank}: {} bytes for {span:?}", data.len())));
    }
    to.copy_from_slice(&data);
    Ok(())
}

/// Runs all ranks to the end. `hosts` groups the places that share memory.
///
/// # Errors
///
/// A schedule that waits for ever, touches memory that does not exist, sends what nobody receives
/// or receives another length than was sent.
pub fn run(
    ranks: Vec<Rank>,
    hosts: &[Vec<Place>],
    dtype: DType,
    op: ReduceOp,
    net: &Net,
    seed: u64,
) -> Result<Report> {
    let n = ranks.len();
    let mut executors = Vec::with_capacity(n);
    let mut memory = Vec::with_capacity(n);
    for rank in ranks {
        let size = dtype.size();
        let garbage = |len: usize| vec![0xa5; len * size]; // uninitialised memory, made visible
        let (scratch, bounce) = (garbage(rank.schedule.scratch), garbage(rank.schedule.bounce));
        let in_place = rank.output.is_none();
        let bufs = [rank.input, rank.output.unwrap_or_default(), scratch, bounce];
        memory.push(Memory { bufs, in_place });
        executors.push(Executor::new(rank.schedule));
    }
    let mut world = World {
        dtype,
        op,
        net,
        hosts,
        now: 0.0,
        memory,
        out: vec![vec![VecDeque::new(); n]; n],
        sending: vec![(false, 0); n],
        in_free: vec![0.0; n],
        queue: BinaryHeap::new(),
        order: 0,
        random: seed,
        spans: HashMap::new(),
        messages: Vec::new(),
        mailbox: HashMap::new(),
        barriers: HashMap::new(),
        sent: vec![0; n],
        count: vec![0; n],
    };
    for (me, executor) in executors.iter_mut().enumerate() {
        executor.start(&mut Wire { me, world: &mut world })?;
    }
    while let Some(Reverse((time, _, event))) = world.queue.pop() {
        world.now = f64::from_bits(time);
        step(&mut world, &mut executors, event)?;
    }
    if let Some(me) = executors.iter().position(|e| !e.is_done()) {
        let peers = executors[me].waiting_for();
        return Err(Error::misuse(format!(
            "sim: rank {me} never finishes: it waits for messages of {peers:?}"
        )));
    }
    if let Some((rank, from, tag)) = world.mailbox.keys().next() {
        return Err(Error::misuse(format!("sim: rank {rank} never receives message {tag} of {from}")));
    }
    let output = world
        .memory
        .into_iter()
        .map(|m| {
            let [input, output, ..] = m.bufs;
            if m.in_place { input } else { output }
        })
        .collect();
    Ok(Report { time: world.now, sent: world.sent, messages: world.count, output })
}

fn step(world: &mut World<'_>, executors: &mut [Executor], event: Event) -> Result<()> {
    match event {
        Event::Sent { rank, step, to, tag } => {
            let Some(span) = world.spans.remove(&(rank, step)) else { return Ok(()) };
            let data = world.bytes(rank, span)?.to_vec();
            let jitter = world.jitter();
            let takes = data.len() as f64 / world.net.rate[to as usize];
            let begin = (world.now + world.net.latency + jitter - takes).max(world.in_free[to as usize]);
            let end = (begin + takes).max(world.now);
            world.in_free[to as usize] = end;
            world.messages.push(data);
            let message = world.messages.len() - 1;
            world.at(end, Event::Arrived { rank: to as usize, from: rank as u32, tag, message });
            world.sending[rank].0 = false;
            world.send_next(rank);
            executors[rank].complete(step, &mut Wire { me: rank, world })
        }
        Event::Arrived { rank, from, tag, message } => {
            let schedule = executors[rank].schedule();
            let Some(step) = schedule.recv_step(from, tag) else {
                return Err(Error::misuse(format!("sim: rank {rank} expects no message {tag} of {from}")));
            };
            if !executors[rank].is_started(step) {
                world.mailbox.insert((rank, from, tag), message);
                return Ok(());
            }
            let Some(span) = world.spans.remove(&(rank, step)) else { return Ok(()) };
            deliver(world, rank, span, message)?;
            executors[rank].complete(step, &mut Wire { me: rank, world })
        }
        Event::Passed { rank, step } => executors[rank].complete(step, &mut Wire { me: rank, world }),
    }
}
