//! The lanes of a rank: how many there are, whether they help, and how work gets to them and back.
//!
//! A lane helps only on a core that nobody else needs. How many cores a rank has is known: those that it may use,
//! divided among the ranks of its host. Whether they are free is measured: while a lane works, it needs as much time of
//! the clock as of a processor, or somebody else wants its core. Where that is so, lanes rest for a while, as waits do
//! that yield (`sys/cores.rs`).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::host::doorbell::Doorbell;
use crate::lanes::free_cores::FreeCores;
use crate::lanes::load::Load;
use crate::lanes::queue::Queue;
use crate::lanes::task::{Run, Task, Work};
use crate::sys::clock;
use crate::sys::cores::Cores;
use crate::sys::{fork, thread_time};

/// Less than this is not worth handing over, in bytes.
const LEAST: usize = 256 << 10;
/// The most lanes unless more are asked for: so many keep a network of 100 Gbit/s busy.
const MOST: usize = 4;
/// How many sums of a call are handed over at a time: enough that no lane is idle while the thread that drives has lost
/// its core, and few enough to search.
const MOST_SUMS: usize = 64;
/// How long a lane looks for more before it sleeps: waking it takes some microseconds of the thread that drives.
const LOOK: Duration = Duration::from_micros(30);
/// Of the time in which lanes work, in thousandths, what others may take before the lanes rest.
const TAKEN: u32 = 200;
/// Work shorter than this says nothing about cores: waking up and looking at the clock take as long.
const SHORT: Duration = Duration::from_micros(20);

/// How many lanes a rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// As many as there are cores for, and only while these are free.
    Auto,
    /// So many, always, for messages and sums of so many bytes at least.
    Exactly {
        /// How many.
        lanes: usize,
        /// Bytes.
        least: usize,
        /// How many sums of a call wait at most.
        sums: usize,
    },
}

impl Wanted {
    /// As `TRIGRAM_LANES` asks for.
    pub fn from_env() -> Self {
        let asked = std::env::var("TRIGRAM_LANES").ok().and_then(|asked| asked.parse().ok());
        asked.map_or(Self::Auto, |lanes| Self::Exactly { lanes, least: LEAST, sums: MOST_SUMS })
    }

    /// How many, for one of `ranks` ranks of a host.
    fn count(self, ranks: usize) -> usize {
        match self {
            Self::Exactly { lanes, .. } => lanes,
            Self::Auto => {
                let cores = std::thread::available_parallelism().map_or(1, usize::from);
                // One is for the thread that drives.
                (cores / ranks.max(1)).saturating_sub(1).min(MOST)
            }
        }
    }
}

/// Whose work is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ticket {
    /// What was to be sent to this rank.
    Sent(u32),
    /// What was to be received from it.
    Received(u32),
    /// A sum of this call and step.
    Summed(u64, u32),
}

/// The lanes of a rank, for the thread that drives.
pub(crate) struct Lanes {
    count: usize,
    /// Ranks on this host, which share what is free.
    ranks: usize,
    /// The cores that this process might use when the lanes were made: the thread that starts them may be bound to one.
    cores: Option<CpuSet>,
    least: usize,
    wanted: Wanted,
    /// Whether a core is free for one at least.
    open: AtomicBool,
    /// Whether there was work for lanes since the last look at the cores.
    used: AtomicBool,
    /// They have ended for good.
    closed: AtomicBool,
    sums: usize,
    free: Mutex<FreeCores>,
    pub(crate) load: Load,
    shared: Arc<Shared>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

struct Shared {
    queue: Queue<(Ticket, Arc<dyn Run>)>,
    over: Mutex<Vec<Ticket>>,
    /// How many tickets there are, for a look without the lock.
    tickets: AtomicU32,
    /// What a lane panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    bell: Doorbell,
    cores: Cores,
    /// Thousandths of the time that others took lately.
    taken: AtomicU32,
    /// Nanoseconds of processor time that lanes have spent, and ticks in which they worked.
    spent: AtomicU64,
    worked: AtomicU64,
}

impl Lanes {
    /// For one of `ranks` ranks of a host, which is woken by `bell`. Threads start with the first work.
    pub(crate) fn new(wanted: Wanted, ranks: usize, bell: Doorbell) -> Self {
        let count = wanted.count(ranks);
        let shared = Shared {
            // Where cores are to be free, they first show that they are.
            queue: Queue::new(if wanted == Wanted::Auto { 0 } else { count as u32 }),
            over: Mutex::default(),
            tickets: AtomicU32::new(0),
            panic: Mutex::default(),
            bell,
            cores: Cores::new(),
            taken: AtomicU32::new(0),
            spent: AtomicU64::new(0),
            worked: AtomicU64::new(0),
        };
        let (open, used) = (AtomicBool::new(false), AtomicBool::new(false));
        let (shared, threads, free) = (Arc::new(shared), Mutex::default(), Mutex::default());
        let (least, sums) = match wanted {
            Wanted::Auto => (LEAST, MOST_SUMS),
            Wanted::Exactly { least, sums, .. } => (least, sums),
        };
        let cores = sched_getaffinity(None).ok();
        Self {
            count,
            ranks,
            cores,
            least,
            wanted,
            open,
            used,
            closed: AtomicBool::new(false),
            sums,
            free,
            load: Load::new(),
            shared,
            threads,
        }
    }

    /// Whether work of this kind is for a lane: a message or a sum of `whole` bytes, of which so many are left.
    pub(crate) fn want(&self, whole: usize, left: usize) -> bool {
        if self.count == 0 || whole < self.least || left < self.least / 4 {
            return false;
        }
        if self.wanted != Wanted::Auto {
            return true;
        }
        if !self.load.is_much(self.shared.worked.load(Ordering::Relaxed)) {
            return false;
        }
        self.used.store(true, Ordering::Relaxed);
        self.open.load(Ordering::Relaxed) && !self.shared.cores.are_wanted()
    }

    /// Looks how many cores are free, if there was work for lanes; to be called some times a second.
    pub(crate) fn look_at_cores(&self) {
        if self.wanted != Wanted::Auto || !self.used.swap(false, Ordering::Relaxed) {
            return;
        }
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(free) = free.look(self.spent(), self.ranks) else {
            // Too early: the next look is for this work too.
            return self.used.store(true, Ordering::Relaxed);
        };
        self.use_cores(free);
    }

    /// So many cores are free for this rank.
    fn use_cores(&self, free: u32) {
        let most = free.min(self.count as u32);
        self.shared.queue.set_most(most);
        self.open.store(most > 0, Ordering::Relaxed);
    }

    /// How many sums of a call are handed over at a time.
    pub(crate) fn most_sums(&self) -> usize {
        self.sums
    }

    /// Hands work over; a ticket says when it is over. Without lanes, after their end, and if no thread can be started, it
    /// is done here.
    pub(crate) fn submit<W: Work>(&self, ticket: Ticket, work: W) -> Task<W> {
        let task = Task::new(work);
        let goes_first = !matches!(ticket, Ticket::Summed(..));
        if !self.start() || !self.shared.queue.push((ticket, task.shared()), goes_first) {
            self.shared.execute(ticket, &*task.shared());
        }
        task
    }

    /// Starts the threads, unless they run; whether any runs.
    fn start(&self) -> bool {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        while threads.len() < self.count && !self.closed.load(Ordering::Relaxed) {
            let (shared, cores) = (self.shared.clone(), self.cores);
            let thread = std::thread::Builder::new().name("trigram-lane".into());
            let run = move || {
                if let Some(cores) = cores {
                    // If that is not allowed, it stays where the thread is that started it.
                    let _ = sched_setaffinity(None, &cores);
                }
                shared.work();
            };
            let Ok(thread) = thread.spawn(run) else { break };
            threads.push(thread);
        }
        !threads.is_empty()
    }

    /// Does a piece of work that waits although all lanes are busy; true if there was one.
    pub(crate) fn help(&self) -> bool {
        let Some((ticket, work)) = self.shared.queue.take() else { return false };
        self.shared.execute(ticket, &*work);
        true
    }

    /// Whether work is over of which nobody has been told.
    pub(crate) fn has_tickets(&self) -> bool {
        self.shared.tickets.load(Ordering::Acquire) > 0
    }

    /// Whose work is over. Some of it may have been taken back before.
    pub(crate) fn tickets(&self) -> Vec<Ticket> {
        let shared = &*self.shared;
        // First the number: what comes after it is found by the next look.
        shared.tickets.swap(0, Ordering::AcqRel);
        if let Some(panic) = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            std::panic::resume_unwind(panic);
        }
        std::mem::take(&mut *shared.over.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Processor time that lanes have spent.
    fn spent(&self) -> Duration {
        Duration::from_nanos(self.shared.spent.load(Ordering::Relaxed))
    }

    /// Ends the lanes: from then on none touches any memory.
    pub(crate) fn close(&self) {
        if fork::is_child() {
            return;
        }
        self.closed.store(true, Ordering::Relaxed);
        self.shared.queue.close();
        // Under the lock: whoever else closes them returns when they have ended, too.
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.drain(..).for_each(|thread| drop(thread.join()));
    }

    /// Ends the lanes if this thread panics before what is returned is dropped: nobody takes their work back then, and
    /// callers' memory goes.
    pub(crate) fn watch(&self) -> Watch<'_> {
        Watch(self)
    }
}

/// See [`Lanes::watch`].
pub(crate) struct Watch<'a>(&'a Lanes);

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.close();
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// A lane.
    fn work(&self) {
        let look = clock::in_ticks(LOOK);
        thread_time::was_interrupted(); // before it had anything to do
        loop {
            let until = clock::ticks().saturating_add(look);
            while !self.queue.has_work() && clock::ticks() < until {
                std::hint::spin_loop();
            }
            let Some((ticket, work)) = self.queue.wait() else { return };
            let done = catch_unwind(AssertUnwindSafe(|| {
                let began = clock::ticks();
                let spent = self.execute(ticket, &*work);
                self.worked.fetch_add(clock::ticks().saturating_sub(began), Ordering::Relaxed);
                self.spent.fetch_add(spent.as_nanos() as u64, Ordering::Relaxed);
            }));
            drop(work);
            self.queue.done();
            if let Err(panic) = done {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
                self.tickets.fetch_add(1, Ordering::Release);
                self.bell.ring();
                return;
            }
        }
    }

    /// Does a piece of work. Returns the processor time that it took.
    fn execute(&self, ticket: Ticket, work: &dyn Run) -> Duration {
        let (began, before) = (Instant::now(), thread_time::spent());
        if !work.run() {
            return Duration::ZERO;
        }
        let (took, spent) = (began.elapsed(), thread_time::spent().saturating_sub(before));
        self.note_time(took, took.saturating_sub(spent));
        self.over.lock().unwrap_or_else(PoisonError::into_inner).push(ticket);
        self.tickets.fetch_add(1, Ordering::Release);
        self.bell.ring();
        spent
    }

    /// Work took so long, and did not run for so long of that.
    fn note_time(&self, took: Duration, stood: Duration) {
        if took < SHORT {
            return;
        }
        let stood = (stood.as_nanos() * 1000 / took.as_nanos()) as u32;
        // It may also have slept, where two directions of a connection share something: nobody took its core then.
        self.note_taken(if stood > TAKEN && thread_time::was_interrupted() { stood } else { 0 });
    }

    /// Of the time that work took, others had so many thousandths.
    fn note_taken(&self, taken: u32) {
        // Threads may do this at the same time; what one of them notes is good enough.
        let mean = (self.taken.load(Ordering::Relaxed) * 7 + taken) / 8;
        let rest = mean > TAKEN;
        self.taken.store(if rest { 0 } else { mean }, Ordering::Relaxed);
        if rest {
            self.cores.note_wanted();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Says where it was done, or panics.
    struct Noting(Option<std::thread::ThreadId>, bool);

    impl Work for Noting {
        fn run(&mut self, _stop: &dyn Fn() -> bool) {
            assert!(!self.1, "a lane fails");
            self.0 = Some(std::thread::current().id());
        }
    }

    fn lanes(wanted: Wanted) -> Lanes {
        let mut lanes = Lanes::new(wanted, 1, Doorbell::alone().unwrap());
        lanes.count = 2; // whatever this machine has
        lanes
    }

    fn two() -> Lanes {
        lanes(Wanted::Exactly { lanes: 2, least: 1, sums: 2 })
    }

    fn await_tickets(lanes: &Lanes) -> Vec<Ticket> {
        while !lanes.has_tickets() {
            std::thread::yield_now();
        }
        lanes.tickets()
    }

    #[test]
    fn by_themselves_lanes_take_only_much_and_only_free_cores() {
        let lanes = lanes(Wanted::Auto);
        assert!(!lanes.want(LEAST, LEAST), "no core has shown that it is free");
        assert!(lanes.used.load(Ordering::Relaxed), "so the cores are looked at");
        lanes.use_cores(1);
        assert!(lanes.want(LEAST, LEAST));
        assert!(!lanes.want(LEAST - 1, LEAST - 1) && !lanes.want(LEAST, LEAST / 8));
        let task = lanes.submit(Ticket::Sent(3), Noting(None, false));
        assert_eq!(await_tickets(&lanes), [Ticket::Sent(3)]);
        assert_ne!(task.recall().unwrap().0.unwrap(), std::thread::current().id());
        lanes.use_cores(0);
        assert!(!lanes.want(LEAST, LEAST));
    }

    #[test]
    fn lanes_that_are_interrupted_rest() {
        let lanes = lanes(Wanted::Auto);
        lanes.use_cores(2);
        lanes.shared.note_taken(900);
        assert!(lanes.want(LEAST, LEAST), "once says nothing");
        (0..8).for_each(|_| lanes.shared.note_taken(900));
        assert!(!lanes.want(LEAST, LEAST));
    }

    #[test]
    fn what_no_lane_can_do_is_done_at_once() {
        let lanes = two();
        lanes.close();
        let task = lanes.submit(Ticket::Received(1), Noting(None, false));
        assert!(task.is_finished());
        assert_eq!(lanes.tickets(), [Ticket::Received(1)]);
        assert_eq!(task.recall().unwrap().0, Some(std::thread::current().id()));
        assert!(lanes.threads.lock().unwrap().is_empty());
    }

    #[test]
    fn the_panic_of_a_lane_is_that_of_the_thread_that_drives() {
        let lanes = two();
        let _task = lanes.submit(Ticket::Summed(1, 2), Noting(None, true));
        let told = catch_unwind(AssertUnwindSafe(|| await_tickets(&lanes)));
        assert_eq!(*told.unwrap_err().downcast::<&str>().unwrap(), "a lane fails");
    }

    #[test]
    fn a_thread_that_panics_ends_the_lanes_before_its_memory_goes() {
        let lanes = two();
        drop(lanes.submit(Ticket::Sent(0), Noting(None, false)));
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _watch = lanes.watch();
            panic!("inside the engine");
        }));
        assert!(panicked.is_err() && lanes.closed.load(Ordering::Relaxed));
        assert!(lanes.threads.lock().unwrap().is_empty());
    }

    #[test]
    fn messages_go_before_sums() {
        let queue = Queue::new(1);
        for (item, goes_first) in [("sum", false), ("message", true), ("another sum", false)] {
            assert!(queue.push(item, goes_first));
        }
        let next = || {
            let item = queue.wait();
            queue.done();
            item
        };
        assert_eq!([next(), next(), next()], [Some("message"), Some("sum"), Some("another sum")]);
    }
}
