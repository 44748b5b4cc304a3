//! What processes have used, from outside: processor time and memory, as Linux tells in /proc.

use crate::Failure;
use std::fs;

/// /proc counts in hundredths of a second, whatever the kernel's own clock is.
const TICKS_PER_SECOND: f64 = 100.0;

/// The fields of /proc/PID/stat that matter here.
struct Stat {
    parent: u32,
    own: f64,
    ended_children: f64,
}

/// Seconds of processor time that the process has used.
pub(crate) fn of_process(pid: u32) -> Result<f64, Failure> {
    Ok(stat(pid)?.own)
}

/// Seconds of processor time that a process and all its children have used, those that have ended included. Where one
/// ends while we look, its time has moved to the parent's account, and we look again.
pub(crate) fn of_family(parent: u32) -> Result<f64, Failure> {
    loop {
        let itself = stat(parent)?;
        let children = of_living_children(parent)?;
        if stat(parent)?.ended_children == itself.ended_children {
            return Ok(itself.own + itself.ended_children + children);
        }
    }
}

fn of_living_children(parent: u32) -> Result<f64, Failure> {
    let mut seconds = 0.0;
    for entry in fs::read_dir("/proc")?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // A process may end while we look.
        if let Ok(child) = stat(pid)
            && child.parent == parent
        {
            seconds += child.own + child.ended_children;
        }
    }
    Ok(seconds)
}

pub(crate) fn parent(pid: u32) -> Result<u32, Failure> {
    Ok(stat(pid)?.parent)
}

/// The most memory that a process had resident, in bytes.
pub(crate) fn peak_memory(pid: u32) -> Result<u64, Failure> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok());
    Ok(kilobytes.ok_or_else(|| format!("/proc/{pid}/status has no VmHWM in kB"))? * 1024)
}

fn stat(pid: u32) -> Result<Stat, Failure> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    parse(&text).ok_or_else(|| format!("/proc/{pid}/stat is {text:?}, expected at least 17 fields").into())
}

/// The second field is the program's name in parentheses, which may itself contain spaces and parentheses.
fn parse(text: &str) -> Option<Stat> {
    let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
    let seconds = |field: usize| Some(fields.get(field)?.parse::<f64>().ok()? / TICKS_PER_SECOND);
    Some(Stat {
        parent: fields.get(1)?.parse().ok()?,
        own: seconds(11)? + seconds(12)?,
        ended_children: seconds(13)? + seconds(14)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_spaces_and_parentheses_does_not_move_the_fields() {
        let stat = parse("7 (a (b) c) S 3 7 7 0 -1 0 0 0 0 0 150 50 300 100 20 0").expect("legal");
        assert_eq!((stat.parent, stat.own, stat.ended_children), (3, 2.0, 4.0));
    }

    #[test]
    fn this_process_has_a_parent_and_memory() {
        let own = std::process::id();
        assert!(parent(own).expect("readable") > 0);
        assert!(peak_memory(own).expect("readable") > 1024);
    }
}
