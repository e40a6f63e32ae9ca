// SPDX-License-Identifier: Apache-2.0
//! Layouts by order instead of by search: the caller says which cards work together and how large a share
//! each gets.

use spanker_model::Model;

use crate::PlanError;
use crate::cost::Group;
use crate::cost::shard::{Split, Units, apportion, shards};
use crate::plan::{Layout, Stage};

impl Layout {
    /// One copy of the model on these groups, each a list of cards with their shares. Layers are divided
    /// between groups by the sums of their shares, matrices within a group by the shares of its cards. One
    /// group is tensor-parallel, groups of one card are a pipeline.
    ///
    /// ```
    /// use spanker_model::{Quant, builtin};
    /// use spanker_plan::{Layout, Split, Strategy};
    /// let model = builtin("smollm2-135m", Quant::Q4_0).unwrap();
    /// let uneven = Layout::of_groups(&model, Split::Gather, &[vec![(0, 3.0), (1, 1.0)]]).unwrap();
    /// assert_eq!(uneven.strategy(), Strategy::TensorGather);
    /// assert_eq!(uneven.replicas[0][0].group.shards[0].heads, 0..7);
    /// let pipeline = Layout::of_groups(&model, Split::Gather, &[vec![(0, 1.0)], vec![(1, 1.0)]]).unwrap();
    /// assert_eq!(pipeline.replicas[0][1].layers, 15..30);
    /// ```
    ///
    /// # Errors
    /// [`PlanError::Layout`] for no cards, a share that is not a positive number, more groups than layers,
    /// or more cards in a group than the model has rows.
    pub fn of_groups(
        model: &Model,
        split: Split,
        groups: &[Vec<(usize, f64)>],
    ) -> Result<Layout, PlanError> {
        let wrong = |what: String| Err(PlanError::Layout { what });
        if groups.is_empty() || groups.iter().any(Vec::is_empty) {
            return wrong("a group has no cards".into());
        }
        for &(card, share) in groups.iter().flatten() {
            if !(share.is_finite() && share > 0.0) {
                return wrong(format!(
                    "a share of {share} for card {card} is not a positive number"
                ));
            }
        }
        let layers = model.layers.len();
        if groups.len() > layers {
            return wrong(format!("{} stages for {layers} layers", groups.len()));
        }
        let most = groups.iter().map(Vec::len).max().unwrap_or(0);
        if most as u64 > model.hidden {
            return wrong(format!("{most} cards for matrices of {} rows", model.hidden));
        }
        let sums: Vec<f64> =
            groups.iter().map(|group| group.iter().map(|(_, share)| share).sum()).collect();
        // Every stage has a layer; the others go by share.
        let rest = apportion((layers - groups.len()) as u64, &sums);
        let mut start = 0;
        let stages = groups.iter().zip(rest).map(|(cards, more)| {
            let layers = start..start + 1 + more as usize;
            start = layers.end;
            let split = if cards.len() == 1 { Split::Whole } else { split };
            let weights: Vec<f64> = cards.iter().map(|&(_, share)| share).collect();
            let shards = shards(model, split, Units::of(model, split), &weights);
            let cards = cards.iter().map(|&(card, _)| card).collect();
            Stage { group: Group { cards, split, shards }, layers }
        });
        Ok(Layout { replicas: vec![stages.collect()] })
    }
}
