"""What all pictures share: a legend that stays inside, captions that wrap, files that are refused in one line."""

from __future__ import annotations

import pytest
from matplotlib.image import imread

from mxquant.errors import MXQuantError
from mxquant.presentation import picture


@pytest.mark.parametrize("series", [1, 3, 12])
def test_the_legend_stays_inside_the_figure(series, tmp_path):
    figure = picture.new_figure(5.1, 4.0)
    axis = figure.subplots()
    handles = {f"e4m3+global/16/four-over-six {i}": axis.plot([0, 1], [i, i])[0] for i in range(series)}
    picture.style_axis(axis)
    picture.add_legend(figure, handles)
    picture.add_caption(figure, "a caption that is longer than a line of the figure has room for " * 4)
    picture.save(figure, tmp_path / "p.png")
    figure.draw_without_rendering()  # at the figure's own resolution, not the file's
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= figure.bbox.x1
    assert box.y1 <= figure.bbox.y1
    assert box.y0 >= axis.get_window_extent().y1
    assert axis.get_window_extent().height > 0.5 * 4.0 * figure.dpi  # the panel keeps its room
    assert imread(tmp_path / "p.png").shape[1] == 5.1 * 150


def test_a_name_or_folder_that_cannot_be_written_is_one_error(tmp_path):
    figure = picture.new_figure(2, 2)
    with pytest.raises(MXQuantError, match=r"pictures are written as \.png, \.pdf, \.svg, not as 'p\.gif'"):
        picture.save(figure, tmp_path / "p.gif")
    with pytest.raises(MXQuantError, match=r"cannot write the picture .*nowhere/p\.png: No such file or directory"):
        picture.save(figure, tmp_path / "nowhere" / "p.png")
