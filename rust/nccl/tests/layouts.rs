//! Structures passed to NCCL, against the headers of all versions: `layouts.txt` was made from them
//! by `layouts.sh`, a line each, with a C compiler.

use std::mem::offset_of;

use nccl_rs::{Config, RawConfig, UniqueId, Version};

macro_rules! offsets {
    ($($field:ident),*) => { [$((stringify!($field), offset_of!(RawConfig, $field))),*] };
}

fn ours() -> Vec<(&'static str, usize)> {
    offsets![
        size,
        magic,
        version,
        blocking,
        cgaClusterSize,
        minCTAs,
        maxCTAs,
        netName,
        splitShare,
        trafficClass,
        commName,
        collnetEnable,
        CTAPolicy,
        shrinkShare,
        nvlsCTAs,
        nChannelsPerNetPeer,
        nvlinkCentricSched,
        graphUsageMode,
        numRmaCtx,
        maxP2pPeers,
        graphStreamOrdering,
        launchOrderImplicit,
        numRmaSig,
        rmaEagerInit,
        hostCftMode,
        nvlsHostMode
    ]
    .to_vec()
}

#[test]
fn every_field_lies_where_every_header_has_it() {
    let (ours, mut versions, mut seen) = (ours(), 0, std::collections::BTreeSet::new());
    for line in include_str!("layouts.txt").lines() {
        let mut words = line.split(' ');
        let parts: Vec<u32> = words.next().unwrap().split('.').map(|n| n.parse().unwrap()).collect();
        let version = Version::new(parts[0], parts[1], parts[2]);
        for (name, value) in words.map(|w| w.split_once('=').unwrap()) {
            let theirs: usize = value.parse().unwrap();
            match name {
                "sizeof" => assert_eq!(RawConfig::size_in(version), theirs, "{version}: size"),
                "id" => assert_eq!(UniqueId::BYTES, theirs, "{version}: id"),
                field => {
                    let mine = ours.iter().find(|(n, _)| *n == field);
                    assert_eq!(mine.map(|m| m.1), Some(theirs), "{version}: {field}");
                    seen.insert(field);
                }
            }
        }
        versions += 1;
    }
    assert!(versions >= 17 && seen.len() == ours.len(), "{versions} versions, {} fields", seen.len());
}

#[test]
fn what_is_not_set_is_undefined_and_what_is_set_is_set() {
    let version = Version::new(2, 18, 3);
    let raw = Config::new().raw(version);
    assert_eq!((raw.size, raw.magic, raw.version, raw.blocking), (48, 0xcafe_beef, 21_803, 0));
    let undefined =
        [raw.cgaClusterSize, raw.minCTAs, raw.maxCTAs, raw.splitShare, raw.trafficClass, raw.nvlsHostMode];
    assert!(undefined.iter().all(|&v| v == i32::MIN) && raw.netName.is_null() && raw.commName.is_null());
    let config = Config::new().ctas(4, 2).net_name("Trigram").split_share(true);
    let raw = config.raw(version);
    assert_eq!((raw.minCTAs, raw.maxCTAs, raw.splitShare), (2, 2, 1));
    // SAFETY: it points into `config`.
    assert_eq!(unsafe { std::ffi::CStr::from_ptr(raw.netName) }.to_str(), Ok("Trigram"));
}

#[test]
fn a_newer_library_than_any_known_is_told_what_is_known() {
    let raw = Config::new().raw(Version::new(2, 40, 1));
    assert_eq!((raw.size, raw.version), (120, 23_299));
}
