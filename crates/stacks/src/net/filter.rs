//! Tables of packet filters, by nft(8): as JSON, since its own language may read files of the host
//! (`include`), and a checkpoint may come from any source.

use dormouse_kernel::netlink::{Message, Protocol, Socket, attributes};
use dormouse_kernel::{nft, proc};
use dormouse_record::check::filter::check;
use serde_json::{Value, json};

use crate::quiet;

/// Names of all tables that were not made here.
pub(super) fn tables() -> Vec<String> {
    const GET_TABLE: u16 = 10 << 8 | 1;
    const NAME: u16 = 1;
    let mut all = Vec::new();
    // struct nfgenmsg: family, version, number. A kernel without nftables has no tables.
    let each = |answer: &[u8]| {
        let found = attributes(answer.get(4..)?)?;
        let name = found.iter().find(|(kind, _)| *kind == NAME).map(|(_, name)| *name);
        let name = String::from_utf8_lossy(name.unwrap_or_default());
        let name = name.trim_end_matches('\0');
        if !quiet::is_ours(name) {
            all.push(format!("an nftables table {name}"));
        }
        Some(())
    };
    let request = Message::new(&[0; 4]);
    let _ = Socket::open(Protocol::Filter)
        .and_then(|mut socket| socket.dump(GET_TABLE, &request, each));
    all
}

/// Tables of the filters before nftables (xtables-legacy(8)), which cannot be read as a whole.
pub(super) fn old_tables() -> Vec<String> {
    let of_family = |family: &str| {
        let names = proc::whole_text(format!("/proc/thread-self/net/{family}_tables_names"));
        let names = names.unwrap_or_default();
        names.lines().map(|name| format!("an {family}tables table {name}")).collect::<Vec<_>>()
    };
    ["ip", "ip6", "arp"].into_iter().flat_map(of_family).collect()
}

/// All tables of the calling thread's stack; the error is the cause.
pub(super) fn all() -> Result<String, String> {
    let tables = tables();
    let Some(table) = tables.first() else { return Ok(String::new()) };
    let failed = |e: &dyn std::fmt::Display| format!("with {table}: {e}");
    let text = nft::list().map_err(|e| failed(&e))?;
    let mut listed: Value = serde_json::from_str(&text).map_err(|e| failed(&e))?;
    let all = listed["nftables"].as_array_mut().map(std::mem::take).unwrap_or_default();
    let all = all.into_iter().filter_map(|mut one| {
        let (kind, thing) = one.as_object_mut()?.iter_mut().next()?;
        let thing = thing.as_object_mut()?;
        let table = thing.get(if kind == "table" { "name" } else { "table" });
        let is_ours = table.and_then(Value::as_str).is_some_and(quiet::is_ours);
        // The position in the kernel's list, which differs each time.
        thing.remove("handle");
        (kind != "metainfo" && !is_ours).then_some(one)
    });
    let text = json!({ "nftables": all.collect::<Vec<_>>() }).to_string();
    check(&text).map_err(|what| failed(&what))?;
    Ok(text)
}

/// Makes these tables in the calling thread's stack.
pub(super) fn make(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Ok(());
    }
    check(text).map_err(|what| format!("with packet filters that are not valid: {what}"))?;
    nft::apply_json(text)
        .map_err(|e| format!("with packet filters that nft cannot make again: {e}"))
}
