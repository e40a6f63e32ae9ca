// SPDX-License-Identifier: Apache-2.0
//! Whether a launcher of parallel programs started this process, by its environment. Nothing is called.

/// Who started this process as one of several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Launcher {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// A launcher that speaks PMI, as those of MPICH and its descendants do.
    Pmi,
    /// `srun` of Slurm, by way of `PMIx`.
    Slurm,
}

impl Launcher {
    const ALL: [Launcher; 3] = [Launcher::OpenMpi, Launcher::Pmi, Launcher::Slurm];

    /// The variables that say so: the first is the number of ranks, all must be there.
    const fn variables(self) -> &'static [&'static str] {
        match self {
            Launcher::OpenMpi => &["OMPI_COMM_WORLD_SIZE"],
            Launcher::Pmi => &["PMI_SIZE"],
            Launcher::Slurm => &["SLURM_NTASKS", "PMIX_RANK"],
        }
    }
}

/// The launcher that started this process, and the number of its ranks.
#[must_use]
pub fn launcher() -> Option<(Launcher, usize)> {
    find(|name| std::env::var(name).ok())
}

/// The number of ranks that a launcher says it has started; nothing if none started this process.
#[must_use]
pub fn launched() -> Option<usize> {
    launcher().map(|(_, ranks)| ranks)
}

/// The rank that a launcher says this process is.
#[must_use]
pub fn launched_rank() -> Option<usize> {
    let (launcher, _) = launcher()?;
    let name = match launcher {
        Launcher::OpenMpi => "OMPI_COMM_WORLD_RANK",
        Launcher::Pmi => "PMI_RANK",
        Launcher::Slurm => "PMIX_RANK",
    };
    std::env::var(name).ok()?.parse().ok()
}

fn find(variable: impl Fn(&str) -> Option<String>) -> Option<(Launcher, usize)> {
    Launcher::ALL.into_iter().find_map(|launcher| {
        let names = launcher.variables();
        let values: Option<Vec<String>> = names.iter().map(|name| variable(name)).collect();
        Some((launcher, values?.first()?.parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(set: &[(&str, &str)]) -> Option<(Launcher, usize)> {
        find(|name| set.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn launchers_are_known_by_what_they_set() {
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[("OMPI_COMM_WORLD_SIZE", "4")]), Some((Launcher::OpenMpi, 4)));
        assert_eq!(of(&[("PMI_SIZE", "2"), ("PMI_RANK", "0")]), Some((Launcher::Pmi, 2)));
        let slurm = [("SLURM_NTASKS", "8"), ("PMIX_RANK", "3")];
        assert_eq!(of(&slurm), Some((Launcher::Slurm, 8)));
    }

    #[test]
    fn a_batch_job_without_ranks_and_nonsense_are_no_launchers() {
        assert_eq!(of(&[("SLURM_NTASKS", "8")]), None);
        assert_eq!(of(&[("PMI_SIZE", "many")]), None);
    }
}
