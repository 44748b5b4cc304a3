//! What a run leaves out because the machine lacks it. Leaving something out is never silent: the report says so, and in CI
//! it fails the run if installing a program would have helped.

/// A part of the torture that did not take place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Skipped {
    /// The fault, or the part of the fleet.
    pub(crate) what: &'static str,
    pub(crate) why: String,
    /// Whether installing something helps. If not, the machine does not allow it: `why` is the stated reason.
    pub(crate) can_be_installed: bool,
}

impl Skipped {
    pub(crate) fn install(what: &'static str, why: impl Into<String>) -> Skipped {
        Skipped { what, why: why.into(), can_be_installed: true }
    }

    pub(crate) fn not_allowed(what: &'static str, why: impl Into<String>) -> Skipped {
        Skipped { what, why: why.into(), can_be_installed: false }
    }

    fn fails(&self, ci: bool) -> bool {
        ci && self.can_be_installed
    }
}

/// Whether this is CI.
pub(crate) fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "0" && value != "false")
}

/// The lines of the report about what did not take place, and whether the run passes all the same. A full run must inflict
/// each kind of fault; a short one only says which did not fit in.
pub(crate) fn report(skipped: &[Skipped], missing: &[String], full: bool, ci: bool) -> (Vec<String>, bool) {
    let mut lines: Vec<String> = skipped
        .iter()
        .map(|skipped| {
            let verdict = if skipped.fails(ci) { ": a failure in CI" } else { "" };
            format!("SKIPPED {}: {}{verdict}", skipped.what, skipped.why)
        })
        .collect();
    if !missing.is_empty() {
        let verdict = if full { ": a failure, a full run inflicts each" } else { " (too short a run for all of them)" };
        lines.push(format!("NEVER OCCURRED {}{verdict}", missing.join(", ")));
    }
    let passes = (missing.is_empty() || !full) && !skipped.iter().any(|skipped| skipped.fails(ci));
    (lines, passes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_program_fails_in_ci_and_a_missing_right_does_not() {
        let program = Skipped::install("pooler", "PgBouncer is not installed");
        let right = Skipped::not_allowed("wal-full", "only root may mount a small disk");
        let passes = |skipped: &Skipped, ci| report(std::slice::from_ref(skipped), &[], false, ci).1;
        assert!(passes(&program, false));
        assert!(!passes(&program, true));
        assert!(passes(&right, true));
        let (lines, _) = report(&[program, right], &[], false, true);
        assert_eq!(lines[0], "SKIPPED pooler: PgBouncer is not installed: a failure in CI");
        assert_eq!(lines[1], "SKIPPED wal-full: only root may mount a small disk");
    }

    #[test]
    fn a_full_run_fails_if_a_kind_of_fault_never_occurred() {
        let missing = ["kill".to_owned()];
        assert!(report(&[], &missing, false, true).1);
        assert!(!report(&[], &missing, true, false).1);
        assert_eq!(report(&[], &missing, false, true).0.len(), 1);
        assert!(report(&[], &[], true, true).1);
    }
}
