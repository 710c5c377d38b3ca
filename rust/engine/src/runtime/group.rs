//! A group of ranks, and the calls they can make.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use trigram_core::planner::Call;
use trigram_core::signature::{Collective, Signature};
use trigram_core::{Error, Result};

use crate::call::request::{Message, Request, Submission, Tensors};
use crate::group::members::Members;
use crate::runtime::engine::Engine;
use crate::sys::completion::Completion;
use crate::sys::completion::InterruptCheck;

/// A group that this rank belongs to.
#[derive(Clone)]
pub struct Group {
    engine: Arc<Engine>,
    members: Arc<Members>,
}

/// The FNV-1a hash: spreads a few numbers over 64 bits, the same on every rank.
fn hash(numbers: impl Iterator<Item = u64>) -> u64 {
    let mut h = 0xcbf2_9ce4_8422_2325u64;
    for n in numbers {
        for byte in n.to_le_bytes() {
            h = (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    h
}

impl Group {
    /// The group of `ranks` (world ranks, in the order of their places). Every member creates it, in the same order
    /// if there are several; no message is sent. `ordinal` distinguishes groups of the same ranks. The last `helpers`
    /// ranks have no data; they call [`Group::help`].
    pub fn new(
        engine: &Arc<Engine>,
        name: String,
        ranks: Vec<u32>,
        ordinal: u64,
        helpers: u32,
    ) -> Result<Self> {
        crate::sys::fork::check()?;
        let mut sorted = ranks.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != ranks.len() {
            return Err(Error::misuse(format!(
                "group {name}: {ranks:?} names a rank twice; name each rank once"
            )));
        }
        if helpers as usize >= ranks.len() {
            return Err(Error::misuse(format!(
                "group {name}: with {helpers} helpers among {} ranks, no rank has data; name fewer helpers",
                ranks.len()
            )));
        }
        // Neither 0 nor the largest number: the control segment uses them.
        let id = hash([ordinal, u64::from(helpers)].into_iter().chain(ranks.iter().map(|&r| u64::from(r))));
        let id = id.clamp(1, u64::MAX - 1);
        let members = Members::new(id, name, ranks, helpers, engine.world())?;
        Ok(Self { engine: engine.clone(), members: Arc::new(members) })
    }

    /// Its members.
    pub fn members(&self) -> &Members {
        &self.members
    }

    /// The engine that runs its calls.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    pub(crate) fn check(&self, request: &Request) -> Result<()> {
        let Request { call, op, tensors, lists, message, .. } = request;
        let world = self.members.ranks.len();
        if self.members.me >= self.members.layout.workers() {
            return Err(Error::misuse(format!(
                "{}: this rank only helps group {} and takes part in its calls by itself; make the call on the other ranks",
                call.what.name(),
                self.members.name
            )));
        }
        if matches!(
            call.what,
            Collective::AllReduce | Collective::Reduce | Collective::ReduceScatter | Collective::Update
        ) {
            op.check(call.dtype)?;
        }
        if call.root as usize >= world {
            return Err(Error::misuse(format!(
                "{}: root {} is not a rank of this group of {world} ranks",
                call.what.name(),
                call.root
            )));
        }
        if let Some(Message { peer, .. }) = message.filter(|m| !m.is_from_any())
            && (peer as usize >= world || peer == self.members.me)
        {
            return Err(Error::misuse(format!(
                "send/recv: rank {peer} is not another rank of this group of {world} ranks"
            )));
        }
        let parts = matches!(
            call.what,
            Collective::AllToAll | Collective::ReduceScatter | Collective::AllGather | Collective::Update
        );
        if call.splits.is_some() && !parts {
            return Err(Error::Unsupported(format!(
                "{}: parts of different lengths are not supported; pad them to equal lengths, or use all_to_all",
                call.what.name()
            )));
        }
        if let Some((sent, received)) = &call.splits
            && (sent.len() != world || received.len() != world)
        {
            return Err(Error::misuse(format!(
                "{}: {} and {} lengths for {world} ranks; give one for each rank",
                call.what.name(),
                sent.len(),
                received.len()
            )));
        }
        if !request.has_sound_update() {
            return Err(Error::misuse(
                "update: its pieces do not fit the weights, the gradients or their rules",
            ));
        }
        if request.overlaps(self.members.me) {
            return Err(Error::misuse(format!(
                "{}: input and output overlap in memory; pass a copy of the input (tensor.clone())",
                call.what.name()
            )));
        }
        let size = call.dtype.align();
        let aligned = |at: *const u8, len: usize| len == 0 || (at as usize).is_multiple_of(size);
        let is_aligned = match lists.as_deref() {
            Some((inputs, outputs)) => inputs.are_aligned(size) && outputs.are_aligned(size),
            None => aligned(tensors.input, tensors.input_len) && aligned(tensors.output, tensors.output_len),
        };
        if !is_aligned {
            return Err(Error::misuse(format!(
                "{}: the tensor's memory is not aligned to the size of its elements; pass a copy (tensor.clone())",
                call.what.name()
            )));
        }
        Ok(())
    }

    fn submission(&self, request: Request, limit: Option<Duration>) -> Submission {
        let mut request = request.normal(self.members.me);
        if request.message.is_none() {
            request.pass = self.members.pass.load(Ordering::Relaxed);
            self.members.made.fetch_add(1, Ordering::Relaxed);
        }
        Submission::new(self.members.clone(), request, Arc::default(), limit)
    }

    /// Makes a call and waits for its end. Calls `check_interrupt` every few milliseconds while waiting; its error
    /// ends the call on every rank.
    ///
    /// # Safety
    ///
    /// The memory of the request is valid, of the lengths that the call needs, and used by nobody
    /// else until this returns.
    pub unsafe fn run(
        &self,
        request: Request,
        limit: Option<Duration>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<()> {
        self.check(&request)?;
        self.engine.run(self.submission(request, limit), check_interrupt)
    }

    /// Makes a receive and waits for its end. Returns the world rank whose message it has taken.
    ///
    /// # Safety
    ///
    /// As for [`Group::run`].
    pub unsafe fn receive(
        &self,
        request: Request,
        limit: Option<Duration>,
        check_interrupt: InterruptCheck<'_>,
    ) -> Result<u32> {
        self.check(&request)?;
        let submission = self.submission(request, limit);
        let completion = submission.completion.clone();
        self.engine.run(submission, check_interrupt)?;
        completion.sender().ok_or_else(|| {
            Error::misuse("internal error: a receive has ended without a sender; please report it")
        })
    }

    /// Starts a call. Somebody waits for it with [`Engine::wait`] soon, or else the background thread carries it out.
    ///
    /// # Safety
    ///
    /// The memory of the request is valid, of the lengths that the call needs, and used by nobody
    /// else until the completion handle is resolved.
    pub unsafe fn start(&self, request: Request, limit: Option<Duration>) -> Result<Arc<Completion>> {
        self.check(&request)?;
        self.start_with(request, limit, Engine::start)
    }

    fn start_with(
        &self,
        request: Request,
        limit: Option<Duration>,
        start: impl FnOnce(&Engine, Submission) -> Result<()>,
    ) -> Result<Arc<Completion>> {
        let submission = self.submission(request, limit);
        let completion = submission.completion.clone();
        let counted = submission.request.message.is_none();
        start(&self.engine, submission).inspect_err(|_| {
            if counted {
                self.members.made.fetch_sub(1, Ordering::Relaxed); // it was not made
            }
        })?;
        Ok(completion)
    }

    /// Starts a consistency check: an empty call that stands for one elsewhere, such as on GPU memory. If ranks
    /// disagree on it, all get an error; otherwise it ends when all have made it.
    pub fn consistency_check(
        &self,
        mut request: Request,
        limit: Option<Duration>,
    ) -> Result<Arc<Completion>> {
        self.check(&request)?;
        let pass = self.members.pass.load(Ordering::Relaxed);
        let mut signature = request.normal(self.members.me).signature().in_pass(pass);
        signature.extra |= Signature::DEVICE;
        request = Request { declared: Some(signature), ..Request::nothing() };
        self.check(&request)?;
        self.start_with(request, limit, Engine::start_now)
    }

    /// Makes this rank, a helper, take part in all calls of the group in the background, until a member is lost.
    pub fn help(&self) -> Result<()> {
        if self.members.me < self.members.layout.workers() {
            return Err(Error::misuse(format!(
                "group {}: this rank is not one of its helpers, so it cannot help",
                self.members.name
            )));
        }
        self.engine.help(self.members.clone())
    }

    /// Whether this rank still helps.
    pub fn is_helping(&self) -> bool {
        self.engine.is_helping()
    }

    /// The number of the next collective, as [`Group::abort`] counts them.
    pub fn next(&self) -> u64 {
        self.members.made.load(Ordering::Relaxed)
    }

    /// Makes all later collectives of this group part of a backward pass, see
    /// [`trigram_core::signature::Signature::in_pass`].
    pub fn set_pass(&self, pass: u16) {
        self.members.pass.store(pass, Ordering::Relaxed);
    }

    /// Aborts all collectives of this group before the `through`-th, on all ranks: those under way fail with
    /// [`Error::Aborted`], those not yet made are skipped.
    pub fn abort(&self, through: u64, why: &str) -> Result<()> {
        self.fail(through, Error::Aborted(why.to_string()))
    }

    /// Aborts this group for good, on all ranks: calls and messages under way and all later ones fail with
    /// [`Error::Aborted`].
    pub fn abort_all(&self, why: &str) -> Result<()> {
        let rank = self.engine.world().rank;
        let name = &self.members.name;
        let why = if why.is_empty() { String::new() } else { format!(": {why}") };
        let error = format!("rank {rank} has aborted group {name}{why}; make a new group to go on");
        self.engine.abort_group(self.members.clone(), Error::Aborted(error))
    }

    /// As [`Group::abort`], with another error.
    pub fn fail(&self, through: u64, why: Error) -> Result<()> {
        self.members.made.fetch_max(through, Ordering::Relaxed);
        self.engine.abort(self.members.clone(), through, why)
    }
}

/// The memory of an in-place call.
pub fn in_place(at: *mut u8, len: usize) -> Tensors {
    Tensors { input: at, input_len: len, output: at, output_len: len }
}

/// A call with default options.
pub fn call(what: Collective, dtype: trigram_core::DType, len: usize) -> Call {
    Call { what, dtype, len, root: 0, via: trigram_core::signature::Via::Auto, splits: None }
}
