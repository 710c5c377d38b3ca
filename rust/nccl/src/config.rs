//! `ncclConfig_t`, of every version: fields are only ever appended, and a library reads as many as
//! both sides know.

use std::ffi::{CString, c_char, c_int};

use crate::types::Version;

/// What a number that was not set holds: `NCCL_CONFIG_UNDEF_INT`.
pub(crate) const UNDEFINED: c_int = c_int::MIN;
const MAGIC: u32 = 0xcafe_beef;

/// The structure as NCCL 2.32 has it. Names are the header's, so that they can be compared.
#[repr(C)]
#[derive(Clone, Debug)]
#[allow(missing_docs, non_snake_case)] // NCCL's own names; its manual says what they mean
pub struct RawConfig {
    pub size: usize,
    pub magic: u32,
    pub version: u32,
    pub blocking: c_int,
    pub cgaClusterSize: c_int,
    pub minCTAs: c_int,
    pub maxCTAs: c_int,
    pub netName: *const c_char,
    pub splitShare: c_int,
    pub trafficClass: c_int,
    pub commName: *const c_char,
    pub collnetEnable: c_int,
    pub CTAPolicy: c_int,
    pub shrinkShare: c_int,
    pub nvlsCTAs: c_int,
    pub nChannelsPerNetPeer: c_int,
    pub nvlinkCentricSched: c_int,
    pub graphUsageMode: c_int,
    pub numRmaCtx: c_int,
    pub maxP2pPeers: c_int,
    pub graphStreamOrdering: c_int,
    pub launchOrderImplicit: c_int,
    pub numRmaSig: c_int,
    pub rmaEagerInit: c_int,
    pub hostCftMode: c_int,
    pub nvlsHostMode: c_int,
}

impl RawConfig {
    /// Bytes of the structure in a version of NCCL, from that version's own header. A newer one
    /// takes ours for an older caller's.
    pub fn size_in(version: Version) -> usize {
        match (version.major, version.minor) {
            (..=2, ..=26) => 48,
            (2, 27) => 72,
            (2, 28) => 80,
            (2, 29) => 88,
            (2, 30) => 96,
            (2, 31) => 112,
            _ => size_of::<Self>(),
        }
    }

    /// Nothing set, as the library of this version expects it.
    fn undefined(version: Version) -> Self {
        let known = Version::new(2, 32, 99);
        Self {
            size: Self::size_in(version),
            magic: MAGIC,
            version: version.min(known).code(),
            blocking: UNDEFINED,
            cgaClusterSize: UNDEFINED,
            minCTAs: UNDEFINED,
            maxCTAs: UNDEFINED,
            netName: std::ptr::null(),
            splitShare: UNDEFINED,
            trafficClass: UNDEFINED,
            commName: std::ptr::null(),
            collnetEnable: UNDEFINED,
            CTAPolicy: UNDEFINED,
            shrinkShare: UNDEFINED,
            nvlsCTAs: UNDEFINED,
            nChannelsPerNetPeer: UNDEFINED,
            nvlinkCentricSched: UNDEFINED,
            graphUsageMode: UNDEFINED,
            numRmaCtx: UNDEFINED,
            maxP2pPeers: UNDEFINED,
            graphStreamOrdering: UNDEFINED,
            launchOrderImplicit: UNDEFINED,
            numRmaSig: UNDEFINED,
            rmaEagerInit: UNDEFINED,
            hostCftMode: UNDEFINED,
            nvlsHostMode: UNDEFINED,
        }
    }
}

/// How a communicator is made. Communicators of this crate never block: a call that NCCL has not
/// ended is polled, so that a lost rank ends a wait and not a process.
#[derive(Clone, Debug, Default)]
pub struct Config {
    ctas: Option<(u16, u16)>,
    net_name: Option<CString>,
    split_share: bool,
}

impl Config {
    /// NCCL's own choices.
    pub fn new() -> Self {
        Self::default()
    }

    /// Between `least` and `most` thread blocks per collective: fewer leave more of the GPU to the
    /// training beside it.
    #[must_use]
    pub fn ctas(mut self, least: u16, most: u16) -> Self {
        self.ctas = Some((least.min(most), most));
        self
    }

    /// The network by the name that its plugin gives; `NCCL_NET` overrides it. A name with a zero
    /// byte is no name.
    #[must_use]
    pub fn net_name(mut self, name: &str) -> Self {
        self.net_name = CString::new(name).ok();
        self
    }

    /// Communicators split from this one share its resources.
    #[must_use]
    pub fn split_share(mut self, share: bool) -> Self {
        self.split_share = share;
        self
    }

    /// For a library of this version; it points into `self`, which must outlive the call.
    pub fn raw(&self, version: Version) -> RawConfig {
        let mut raw = RawConfig::undefined(version);
        raw.blocking = 0;
        if let Some((least, most)) = self.ctas {
            // One without the other is refused: it is compared with what is not defined.
            (raw.minCTAs, raw.maxCTAs) = (c_int::from(least), c_int::from(most));
        }
        if let Some(name) = &self.net_name {
            raw.netName = name.as_ptr(); // copied by NCCL
        }
        if self.split_share {
            raw.splitShare = 1;
        }
        raw
    }
}
