//! A peer that writes what it likes into its connection, while calls are under way.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use trigram_core::planner::Call;
use trigram_core::schedule::Step;
use trigram_core::signature::{Collective, Signature, Via};
use trigram_core::wire::{CallId, Frame, Kind};
use trigram_core::{DType, Error, ReduceOp, Result};
use trigram_engine::call::calls::Calls;
use trigram_engine::call::request::{Message, Request, Submission};
use trigram_engine::drive::progress::Progress;
use trigram_engine::group::members::Members;
use trigram_engine::group::world::{Patience, World};
use trigram_engine::host::doorbell::Doorbell;
use trigram_engine::lanes::pool::Wanted;
use trigram_engine::link::frames::{AHEAD, Rx, Tx};
use trigram_engine::runtime::group::{call, in_place};
use trigram_engine::transport::stream::{Read, Receiver, Sender};

use crate::common::{Rng, inputs, report};
use crate::{ACCOUNT, turn};

/// The group of all, the one that rank 0 helps, and one that nobody has made.
const ALL: u64 = 77;
const HELPED: u64 = 78;
const UNKNOWN: u64 = 79;

/// Bytes on their way in, and how many come at a time.
#[derive(Default)]
pub(crate) struct Feed {
    pub(crate) bytes: Vec<u8>,
    at: usize,
    pub(crate) chunk: usize,
}

pub(crate) struct Fed(pub(crate) Arc<Mutex<Feed>>);

impl Receiver for Fed {
    fn read(&mut self, into: &mut [u8]) -> Result<Read> {
        let mut feed = self.0.lock().unwrap();
        let n = into.len().min(feed.bytes.len() - feed.at).min(feed.chunk);
        into[..n].copy_from_slice(&feed.bytes[feed.at..feed.at + n]);
        feed.at += n;
        Ok(if n == 0 { Read::Nothing } else { Read::Some(n) })
    }

    fn has_input(&self) -> bool {
        true
    }

    fn read_ahead(&self) -> usize {
        256
    }
}

/// A connection that takes all, or now and then only a part, and stops.
pub(crate) struct Away(pub(crate) Rng);

impl Sender for Away {
    fn write(&mut self, head: &[u8], body: &[u8]) -> Result<usize> {
        let all = head.len() + body.len();
        Ok(if self.0.one_in(4) { self.0.below(all + 1) } else { all })
    }
}

/// A caller's memory, with a border that nobody may write to.
pub(crate) struct Fenced {
    words: Vec<u64>,
    len: usize,
}

const BORDER: u64 = 0x5a5a_5a5a_5a5a_5a5a;

impl Fenced {
    /// `len` bytes.
    pub(crate) fn new(len: usize) -> Self {
        let mut words = vec![BORDER; len.div_ceil(8) + 16];
        words[8..8 + len.div_ceil(8)].fill(0);
        Self { words, len: len.div_ceil(8) * 8 }
    }

    pub(crate) fn at(&mut self) -> *mut u8 {
        self.words[8..].as_mut_ptr().cast()
    }

    pub(crate) fn check(&self) {
        let inner = self.len / 8;
        assert!(self.words[..8].iter().chain(&self.words[8 + inner..]).all(|w| *w == BORDER));
    }
}

/// What a caller of one of many kinds asks for in memory of `len` f32.
pub(crate) fn some_request(rng: &mut Rng, at: *mut u8, len: usize, world: u32) -> Request {
    let tensors = in_place(at, len * 4);
    let peer = 1 + rng.below(world as usize - 1) as u32;
    let sends = rng.one_in(2);
    let mut message = Message { peer, tag: 5, sends, shorter: !sends && rng.one_in(2) };
    if !message.sends && rng.one_in(2) {
        message.peer = Message::ANY;
    }
    let (what, len, message) = match rng.below(6) {
        0 | 1 => (Collective::AllReduce, len, None),
        2 => (Collective::Broadcast, len, None),
        3 => (Collective::AllGather, len / world as usize, None),
        4 => (Collective::AllToAll, len / world as usize, None),
        _ => (Collective::SendRecv, len, Some(message)),
    };
    let via = if what == Collective::AllReduce { Via::ALL[rng.below(6)] } else { Via::Auto };
    let call = Call { via, root: rng.below(2) as u32, ..call(what, DType::F32, len) };
    Request { call, op: ReduceOp::Sum, tensors, lists: None, message, declared: None, pass: 0, update: None }
}

/// A frame that has something to do with what is under way, and its payload. Of some more is said than comes.
pub(crate) fn some_frame(rng: &mut Rng, calls: &Calls, from: u32, into: &mut Vec<u8>) {
    let mut frame = Frame {
        kind: [
            Kind::Data,
            Kind::Ready,
            Kind::Fail,
            Kind::Leave,
            Kind::Rate,
            Kind::Lost,
            Kind::Heartbeat,
            Kind::Offer,
            Kind::Stuck,
        ][rng.below(9)],
        group: [ALL, ALL, HELPED, UNKNOWN][rng.below(4)],
        call: CallId(rng.below(4) as u64),
        tag: rng.below(8) as u32,
        len: rng.below(200) as u32,
        signature: Signature::new(
            Collective::AllReduce,
            DType::F32,
            ReduceOp::Sum,
            Via::ALL[rng.below(6)],
            0,
            rng.below(9000) as u64,
        ),
    };
    if let (false, false) = (calls.active.is_empty(), rng.one_in(8)) {
        let active = &calls.active[rng.below(calls.active.len())];
        let place = active.body.members.place_of(from).unwrap_or_default();
        (frame.group, frame.call) = (active.body.members.id, active.body.call_id);
        if active.body.request.message.is_some_and(|m| m.is_from_any()) {
            frame.call = CallId::message(5, rng.below(3) as u64);
        }
        frame.signature = active.body.expected(place, frame.kind);
        let steps = &active.exec.schedule().steps;
        if !steps.is_empty() && !rng.one_in(4) {
            let at = rng.below(steps.len());
            let recv = steps[at..].iter().chain(&steps[..at]).find_map(|step| match step {
                Step::Recv { from, tag, span } if *from == place => Some((*tag, *span)),
                _ => None,
            });
            if let Some((tag, span)) = recv {
                (frame.kind, frame.tag, frame.len) = (Kind::Data, tag, span.len as u32 * 4);
            }
        }
    }
    if rng.one_in(100) {
        frame.kind = Kind::Abort; // seldom: no call of the group goes on after it
    }
    match frame.kind {
        Kind::Ready | Kind::Leave | Kind::Heartbeat | Kind::Offer => frame.len = 0,
        Kind::Rate => frame.len = 8,
        Kind::Fail | Kind::Lost | Kind::Abort | Kind::Stuck => frame.len = frame.len.min(100),
        Kind::Data => {}
    }
    let start = into.len();
    let mut payload = vec![0; frame.len as usize];
    if matches!(frame.kind, Kind::Fail | Kind::Lost | Kind::Abort) && rng.one_in(2) {
        payload = postcard::to_stdvec(&Error::Aborted("as it may be".into())).unwrap();
        if frame.kind == Kind::Lost {
            frame.tag = rng.below(5) as u32; // of a rank that there is, or nearly
        }
        frame.len = payload.len() as u32;
    } else {
        rng.fill(&mut payload);
    }
    match rng.below(16) {
        0 => frame.signature.count = rng.number(),
        1 => frame.len = frame.len.wrapping_add(rng.number() as u32),
        2 => frame.group = rng.number(),
        3 => frame.call = CallId(rng.number()),
        4 => frame.tag = rng.number() as u32,
        _ => {}
    }
    // Now and then with a sum that is wrong.
    into.extend(frame.encode(rng.one_in(64).then_some(7)));
    into.extend(payload);
    if rng.one_in(16) {
        let mut spoilt = into.split_off(start);
        rng.spoil(&mut spoilt);
        into.extend(spoilt);
    }
}

/// What the engine does with it.
pub(crate) fn round(progress: &mut Progress) {
    while progress.poll() {}
    // Calls that failed wait for those who may still write to their memory; here nobody does.
    progress.end_failed();
}

#[test]
fn streams() {
    let _turn = turn();
    let (count, began, mut rng) = (inputs(40_000), Instant::now(), Rng::new(21));
    let world = Arc::new(World {
        tuning: Vec::new(),
        rank: 0,
        host_of: vec![0, 1, 2],
        far: Vec::new(),
        through: Vec::new(),
        passing: None,
        bell: Doorbell::alone().unwrap(),
        control: None,
        neighbours: Default::default(),
        arena: Arc::default(),
        retired: Arc::default(),
        patience: Patience { limit: Duration::from_millis(1200), ..Patience::default() },
        lanes: Wanted::Exactly { lanes: 1, least: 1, sums: 2 },
    });
    let all = Arc::new(Members::new(ALL, "all".into(), vec![0, 1, 2], 0, &world).unwrap());
    let helped = Arc::new(Members::new(HELPED, "helped".into(), vec![1, 2, 0], 1, &world).unwrap());
    let (mut done, mut ended, mut failed, mut lost, mut worst) = (0, 0u64, 0usize, 0usize, 0.0f64);
    while done < count {
        let before = ACCOUNT.begin();
        let helps = rng.one_in(4);
        let mut memory: Vec<(Fenced, usize)> = (0..4)
            .map(|_| [1, 30, 3000, 9000][rng.below(4)] * 3)
            .map(|len| (Fenced::new(len * 4), len))
            .collect();
        let tx = (0..3).map(|r| (r > 0).then(|| Tx::new(Box::new(Away(rng.clone()))))).collect();
        let feeds: Vec<Arc<Mutex<Feed>>> = (0..3).map(|_| Arc::default()).collect();
        let way = |r: u32| (r > 0).then(|| Rx::new(r, Box::new(Fed(feeds[r as usize].clone()))));
        let mut progress = Progress::new(world.clone(), tx, (0..3).map(way).collect());
        if helps {
            progress.help(helped.clone());
        }
        let (mut completions, mut fed, mut jobs) = (Vec::new(), 0, 0);
        for i in 0..48 {
            if jobs < memory.len() && (i == 0 || rng.one_in(6)) {
                let (memory, len) = &mut memory[jobs];
                let (at, len) = (memory.at(), *len);
                let request = some_request(&mut rng, at, len, 3);
                let completion = Arc::default();
                completions.push(Arc::clone(&completion));
                progress.admit(Submission::new(all.clone(), request, completion, None));
                jobs += 1;
            }
            let from = 1 + rng.below(2);
            {
                let mut feed = feeds[from].lock().unwrap();
                let start = feed.bytes.len();
                some_frame(&mut rng, &progress.calls, from as u32, &mut feed.bytes);
                feed.chunk = 1 + rng.below(8000);
                fed += feed.bytes.len() - start;
            }
            done += 1;
            round(&mut progress);
            if rng.one_in(16) {
                progress.check_time(Instant::now() + Duration::from_secs(1));
            }
            if progress.rx.iter().flatten().count() == 0 {
                break;
            }
        }
        // What is kept grows with what has come. A call that is helped is as large as its first message says, up to a
        // limit of its own, and its memory is not touched before it is used.
        let took = ACCOUNT.peak() - before;
        let own: usize = memory.iter().map(|m| m.1 * 16).sum();
        let most = (4 << 20) + own + 6 * fed + 2 * 2 * AHEAD;
        assert!(helps || took < most, "{took} bytes for {fed} that came, at most {most}");
        worst = if helps { worst } else { worst.max(took as f64 / most as f64) };
        lost += 2 - progress.rx.iter().flatten().count();
        ended += progress.counters.calls.load(std::sync::atomic::Ordering::Relaxed);
        failed += completions.iter().filter(|t| matches!(t.outcome(), Some(Err(_)))).count();
        progress.fail_all(&Error::Aborted("the end".into()), false);
        drop(progress);
        memory.iter().for_each(|m| m.0.check());
    }
    assert!(ended > 0 && failed > 0 && lost > 0);
    let what = format!(
        "{ended} calls ended well, {failed} failed, {lost} peers lost, {:.0} % of the memory",
        worst * 1e2
    );
    report("streams", done, began, &what);
}
